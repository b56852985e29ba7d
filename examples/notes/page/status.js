/** One fixed place that says how the board stands, and the buttons for what can be done about it. */

const SHOW_SAVING_AFTER = 300;

export function showStatus(session, { status, offers, signIn }) {
  let timer;
  let said;

  const say = ({ name, label }) => {
    // Announced are changes of kind: a live region that is written anew is read out anew.
    if (status.textContent !== label) status.textContent = label;
    status.dataset.state = name;
  };

  const offer = ({ name, detail }) => {
    const found = [];
    if (name === "offline" || name === "retrying") found.push(["Retry now", () => session.flush()]);
    if (name === "conflict") {
      if (session.canRebase) found.push(["Put mine on top", () => session.rebase()]);
      found.push(["Use theirs", () => session.discard()]);
    }
    if (name === "readonly_tab") found.push(["Edit here", () => session.takeOver()]);
    if (name === "blocked") found.push(detail.status === 401 ? ["Sign in", signIn] : ["Try again", () => session.flush()]);
    if (name === "clean")
      for (const draft of session.drafts) {
        const at = new Date(draft.updated).toLocaleTimeString([], { timeStyle: "short" });
        found.push([`Restore unsaved text from ${at}`, () => session.recover(draft)]);
        found.push(["Discard it", () => session.dismiss(draft)]);
      }
    const key = JSON.stringify([name, found.map(([text]) => text), session.drafts.map(({ id }) => id)]);
    if (key === said) return; // the button with the focus stays
    said = key;
    offers.replaceChildren(...found.map(([text, act]) => button(text, act)));
  };

  const show = () => {
    clearTimeout(timer);
    if (session.status.name === "saving") timer = setTimeout(() => say(session.status), SHOW_SAVING_AFTER);
    else say(session.status);
    offer(session.status);
  };
  session.addEventListener("status", show);
  show();
}

export function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}
