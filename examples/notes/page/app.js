import { clearDrafts, openDocument } from "/boards/document-session.js";
import { merge } from "./merge.js";
import { button, showStatus } from "./status.js";

const at = (id) => document.getElementById(id);
const post = (url, body) =>
  fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
const asked = new URLSearchParams(location.search);

const { name, people } = await (await fetch("/me")).json();
if (name) await open();
else chooseWho(() => location.reload());

/** Buttons for who signs in. */
function chooseWho(then) {
  at("person").replaceChildren(...people.map((one) => button(`Sign in as ${one}`, () => signIn(one, then))));
}

async function signIn(who, then) {
  if ((await post("/sign-in", { name: who })).ok) then();
}

async function open() {
  const titles = await (await fetch("/titles")).json();
  const id = asked.get("board") ?? titles[0].id;
  at("titles").replaceChildren(...titles.map((one) => link(one, id)));

  const session = openDocument(`/boards/${id}`, {
    user: name,
    merge,
    debounce: Number(asked.get("debounce") ?? 1500), // milliseconds; longer to see a draft, say
  });
  signedIn(session);
  showStatus(session, {
    status: at("status"),
    offers: at("offers"),
    // The same person, or the text of one would be saved by another.
    signIn: () => signIn(name, () => session.flush()),
  });
  edit(session);
}

function signedIn(session) {
  const leave = async () => {
    const saved = await session.flush();
    const kept = saved && !session.status.detail.unsaved;
    if (!kept && !confirm("Not everything is saved. Sign out and lose it?")) return;
    await clearDrafts(name);
    await post("/sign-out", {});
    location.reload();
  };
  at("person").replaceChildren(name, " ", button("Sign out", leave));
}

function link({ id, title }, open) {
  const made = document.createElement("a");
  made.href = `/?board=${id}`;
  made.textContent = title;
  if (id === open) made.setAttribute("aria-current", "page");
  return made;
}

/** The board as fields: what is typed goes to the session, what comes from elsewhere goes into the fields. */
function edit(session) {
  const notes = at("notes");
  const change = (changed) => {
    session.edit({ ...session.content, ...changed });
    draw();
  };
  const write = (id, text) =>
    change({ notes: session.content.notes.map((note) => (note.id === id ? { ...note, text } : note)) });
  const remove = (id) => change({ notes: session.content.notes.filter((note) => note.id !== id) });

  const row = (id) => {
    const made = document.createElement("li");
    const input = document.createElement("input");
    made.dataset.id = id;
    input.setAttribute("aria-label", "Note");
    input.addEventListener("input", () => write(id, input.value));
    made.append(input, button("Remove", () => remove(id)));
    return made;
  };
  const set = (input, value) => {
    if (input.value !== value) input.value = value; // the cursor stays where it is
  };
  /** Rows stay the same elements, so that the focus stays too. */
  const draw = () => {
    if (!session.content) return;
    const rows = new Map([...notes.children].map((one) => [one.dataset.id, one]));
    const wanted = session.content.notes.map(({ id }) => rows.get(id) ?? row(id));
    if (wanted.length !== notes.children.length || wanted.some((one, n) => one !== notes.children[n]))
      notes.replaceChildren(...wanted);
    session.content.notes.forEach(({ text }, n) => set(wanted[n].querySelector("input"), text));
    set(at("title"), session.content.title);
    at("board").hidden = false;
    lock();
  };
  const lock = () => {
    const closed = ["readonly_tab", "gone", "unloaded"].includes(session.status.name);
    for (const field of at("board").querySelectorAll("input")) field.readOnly = closed;
    for (const one of at("board").querySelectorAll("button")) one.disabled = closed;
  };

  at("title").addEventListener("input", () => change({ title: at("title").value }));
  at("board").addEventListener("submit", (event) => event.preventDefault());
  at("add").addEventListener("click", () => {
    change({ notes: [...session.content.notes, { id: `${Date.now()}-${Math.random()}`, text: "" }] });
    notes.lastElementChild.querySelector("input").focus();
  });
  at("ask").addEventListener("click", () => post("/suggestions", { board: session.url.split("/").pop(), version: session.version }));
  session.addEventListener("remote", draw);
  session.addEventListener("status", lock);
  draw();
}
