/** What the session promises beside the numbered cases: refusals, waits, tabs, leaving, drafts of the past. */

import assert from "node:assert/strict";
import test from "node:test";

import { calm, Channels, Databases, heard, json, Locks, Page, problem, Storage, tab, world } from "./world.mjs";

const slotOf = (url, name, user = "dana") => ["durable", user, url, name].map(encodeURIComponent).join("/");

for (const [status, name, label] of [
  [401, "blocked", /^Signed out/], [403, "blocked", /not yours/], [413, "blocked", /^Too large/], [422, "blocked", /not yours/],
  [428, "blocked", /not yours/], [400, "blocked", /not yours/], [500, "blocked", /not yours/], [404, "gone", /deleted/], [410, "gone", /deleted/],
]) {
  test(`a save answered ${status} stops, keeps the work and is not tried again blindly`, async () => {
    const { open, server, storage, timers } = world();
    const session = await open();
    server.faults = [problem(status, { reason: "because", detail: "not yours" })];
    session.edit("mine");

    assert.equal(await session.flush(), false);
    await timers.advance(25_000);

    assert.equal(server.posts.length, 1);
    assert.equal(session.status.name, name);
    assert.match(session.status.label, label);
    assert.deepEqual([session.status.detail.status, session.status.detail.reason], [status, "because"]);
    assert.deepEqual(storage.contents(), ["mine"]);
    assert.equal(await session.flush(), true, "the user's own word tries again");
    assert.equal(session.status.name, "clean");
  });
}

test("after a refusal the next edit is sent, but not into a deleted document", async () => {
  const { open, server, timers } = world();
  const session = await open();
  server.faults = [problem(413, {})];
  session.edit("far too long");
  await session.flush();
  session.edit("short");
  await timers.advance(1500);
  assert.equal(server.current.content, "short");

  server.gone = true;
  session.edit("more");
  await session.flush();
  session.edit("and more");
  await timers.advance(20_000);
  assert.equal(session.status.name, "gone");
  assert.equal(server.posts.length, 3);
});

test("what was typed while the document seemed gone is saved once it is there again", async () => {
  const { open, server, timers } = world();
  const session = await open();
  server.gone = true;
  await session.reload();
  session.edit("mine");
  await timers.advance(20_000);
  assert.deepEqual([session.status.name, server.posts.length], ["gone", 0]);
  server.gone = false;
  await session.reload();
  await timers.advance(1500);
  assert.equal(server.current.content, "mine");
});

test("an edit made while a refused save was on its way is sent by its own debounce", async () => {
  const { open, server, timers } = world();
  const session = await open();
  server.faults = [problem(413, {})];
  server.held = true;
  session.edit("far too long");
  session.flush();
  await calm();
  session.edit("short");
  await timers.advance(2000);
  server.held = false;
  await server.release();
  await timers.advance(1500);
  assert.equal(server.current.content, "short");
});

for (const [status, header, ms] of [[429, "7", 7000], [503, "3", 3000], [429, undefined, undefined]]) {
  test(`${status} with Retry-After ${header} waits so long, whatever is typed or flushed`, async () => {
    const { open, server, timers } = world();
    const session = await open();
    server.faults = [problem(status, {}, header ? { "Retry-After": header } : {})];
    session.edit("one");
    await session.flush();
    assert.equal(session.status.name, "retrying");
    const wait = session.status.detail.retryAt - timers.now();
    if (ms) assert.equal(wait, ms);

    session.edit("two");
    assert.equal(await session.flush(), false);
    await timers.advance(wait - 1);
    assert.equal(server.posts.length, 1);
    await timers.advance(1);
    assert.equal(server.posts.length, 2);
    assert.equal(server.current.content, "two");
  });
}

test("the wait that the server asked for ends with its timer, though the clock was set back meanwhile", async () => {
  for (const back of [1, 900_000]) {
    const { open, server, timers } = world();
    const { setTimeout, clearTimeout } = timers;
    let behind = 0;
    const session = await open({ timers: { setTimeout, clearTimeout, now: () => timers.now() - behind } });
    server.faults = [problem(503, {}, { "Retry-After": "3" })];
    session.edit("mine");
    await session.flush();
    behind = back;
    await timers.advance(3000);
    assert.equal(server.current.content, "mine");
  }
});

test("a Retry-After that is no number is the usual back-off, and none is longer than an hour", async () => {
  for (const [value, least, most] of [["Wed, 21 Oct 2015 07:28:00 GMT", 500, 1000], ["1e9", 3_600_000, 3_600_000]]) {
    const { open, server, timers } = world();
    const session = await open();
    server.faults = [problem(503, {}, { "Retry-After": value })];
    session.edit("mine");
    await session.flush();
    const wait = session.status.detail.retryAt - timers.now();
    assert.ok(least <= wait && wait <= most, `${wait}`);
  }
});

test("network errors are tried again, ever later, on the same base and with the same save id", async () => {
  const { open, server, timers } = world();
  const session = await open();
  server.faults = Array(9).fill("down");
  session.edit("mine");
  await session.flush();
  const waits = [];
  for (let i = 0; i < 8; i++) {
    const wait = session.status.detail.retryAt - timers.now();
    waits.push(wait);
    server.faults = Array(9).fill("down");
    await timers.advance(wait);
  }
  waits.forEach((wait, i) => assert.ok(wait >= 2 ** Math.min(i, 6) * 500 && wait <= 2 ** Math.min(i, 6) * 1000, `${waits}`));
  assert.equal(new Set(server.posts.map(({ body }) => JSON.stringify(body))).size, 1);
  server.faults = [];
  await timers.advance(64_000);
  assert.equal(session.status.name, "clean");
});

for (const fault of [
  "silence", () => json(200, { surprise: true }), () => new Response("<p>Sign in"), () => problem(502, {}), () => problem(504, {}),
]) {
  test(`an answer that is none counts as lost: ${typeof fault == "string" ? fault : fault}`, async () => {
    const { open, server, timers } = world();
    const session = await open();
    server.faults = [fault];
    session.edit("mine");
    const flushed = session.flush();
    await timers.advance(14_999);
    if (fault == "silence") assert.equal(session.status.name, "saving");
    await timers.advance(1);
    assert.equal(await flushed, false);
    await timers.advance(1000);
    assert.equal(server.posts.length, 2);
    assert.equal(server.posts[0].body.save_id, server.posts[1].body.save_id);
    assert.equal(session.status.name, "clean");
  });
}

test("a redirect is a sign-in page, and is not followed", async () => {
  const { open, server } = world();
  const session = await open();
  let init;
  session.edit("mine");
  server.faults = [() => Object.defineProperties(new Response(null), { type: { value: "opaqueredirect" }, ok: { value: false }, status: { value: 0 } })];
  assert.equal(await session.flush(), false);
  assert.deepEqual([session.status.name, session.status.detail.status], ["blocked", 401]);
});

test("a long stretch of typing is saved every ten seconds", async () => {
  const { open, server, timers } = world();
  const session = await open();
  for (let second = 0; second < 25; second++) {
    session.edit(second);
    await timers.advance(1000);
  }
  assert.equal(server.posts.length, 2);
});

test("typing while offline tries once a pause, not at every key", async () => {
  const { open, server, timers } = world();
  const session = await open();
  server.faults = Array(100).fill("down");
  for (let pause = 0; pause < 10; pause++) {
    for (let key = 0; key < 10; key++) {
      session.edit([pause, key]);
      await timers.advance(100);
    }
    await timers.advance(1500);
  }
  assert.ok(server.posts.length <= 20, `${server.posts.length}`);
});

test("what an edit was given may change afterwards; what the session gives out may not", async () => {
  const { open, server } = world();
  const session = await open();
  const content = { rows: [1] };
  session.edit(content);
  content.rows.push(2);
  assert.throws(() => session.content.rows.push(3), TypeError);
  await session.flush();
  assert.deepEqual(server.current.content, { rows: [1] });
});

test("what is no JSON is refused, and changes nothing", async () => {
  const { open, storage } = world("stored");
  const session = await open();
  const circle = {};
  circle.circle = circle;
  for (const content of [undefined, () => 1, circle, 1n]) assert.throws(() => session.edit(content), TypeError);
  assert.deepEqual([session.status.name, session.content, storage.slots.size], ["clean", "stored", 0]);
});

test("null is content like any other", async () => {
  const { open, server } = world(null);
  const session = await open();
  assert.equal(session.content, null);
  session.edit({ a: 1 });
  session.edit(null);
  assert.equal(session.status.name, "dirty");
  assert.equal(await session.flush(), true);
  assert.equal(server.current.version, 1);
});

test("a listener that edits loses neither its edit nor the draft of it", async () => {
  const { open, server, storage, timers } = world();
  const session = await open();
  session.addEventListener("saved", () => session.edit("from the listener"), { once: true });
  session.edit("one");
  await session.flush();
  assert.deepEqual(storage.contents(), server.current.content == "from the listener" ? [] : ["from the listener"]);
  await timers.advance(1500);
  assert.equal(server.current.content, "from the listener");
  assert.equal(storage.slots.size, 0);
});

test("a status listener that edits lets no other listener see an older status last", async () => {
  const { open } = world();
  const session = await open();
  const seen = [];
  session.edit("one");
  session.addEventListener("status", ({ detail: { name } }) => name == "clean" && session.edit("from the listener"));
  session.addEventListener("status", ({ detail: { name } }) => seen.push(name));
  await session.flush();
  assert.deepEqual([seen.at(-1), session.status.name], ["dirty", "dirty"]);
});

test("a refresh takes over what others saved, tells so, and asks with the version it knows", async () => {
  const { open, server } = world("v0");
  const session = await open();
  const events = heard(session);
  await session.reload();
  assert.equal(server.gets[1].headers["If-None-Match"], '"0"');
  assert.deepEqual(events, [], "unchanged");

  server.write("v1");
  await session.reload();
  assert.deepEqual([session.content, session.version], ["v1", 1]);
  assert.deepEqual(events.filter(([type]) => type == "remote").map(([, { content, saved_by }]) => [content, saved_by]), [["v1", "erin"]]);
});

test("a refresh with unsaved work: equal version keeps it, another one is a conflict", async () => {
  const { open, server } = world("v0");
  const session = await open();
  const events = heard(session);
  session.edit("mine");
  await session.reload();
  assert.deepEqual([session.status.name, session.content], ["dirty", "mine"]);

  server.write("theirs");
  await session.reload();
  assert.equal(session.status.name, "conflict");
  assert.match(session.status.label, /^erin saved a newer version at \d/);
  assert.deepEqual([session.content, session.theirs.content], ["mine", "theirs"]);
  assert.equal(events.filter(([type]) => type == "conflict").length, 1);
});

test("staged text alone, too, makes a newer version a conflict", async () => {
  const { open, server } = world("v0");
  const session = await open();
  session.stage("half a wo");
  server.write("theirs");
  await session.reload();
  assert.deepEqual([session.status.name, session.content], ["conflict", "half a wo"]);
});

test("discard waits for the save in flight, fetches, and only then replaces", async () => {
  const { open, server, storage } = world("v0");
  const session = await open();
  session.edit("one");
  server.held = true;
  session.flush();
  await calm();
  session.edit("two");
  const discarded = session.discard();
  await calm();
  assert.equal(server.gets.length, 1);
  await server.release();
  assert.equal(session.content, "two", "nothing is replaced before the answer");
  assert.equal(server.posts.length, 1, "what is to be discarded is not sent");
  server.held = false;
  await server.release();

  assert.equal(await discarded, true);
  assert.deepEqual([session.content, session.version, session.status.name], ["one", 1, "clean"]);
  assert.equal(storage.slots.size, 0);
});

test("a discard that cannot fetch, or races an edit, keeps everything and goes on saving", async () => {
  const { open, server, storage, timers } = world("v0");
  const session = await open();
  session.edit("mine");
  server.faults = ["down"];
  assert.equal(await session.discard(), false);
  assert.equal(session.content, "mine");
  assert.deepEqual(storage.contents(), ["mine"]);

  server.held = true;
  const discarded = session.discard();
  await calm();
  session.edit("more");
  server.held = false;
  await server.release();
  assert.equal(await discarded, false);
  assert.equal(session.content, "more");
  await timers.advance(1500);
  assert.equal(server.current.content, "more");
});

test("a discard that fails while the network is away takes no retry along", async () => {
  const { open, server, timers } = world("v0");
  const session = await open();
  server.faults = ["down", "down"];
  session.edit("mine");
  await session.flush();
  assert.equal(await session.discard(), false);
  await timers.advance(2000);
  assert.equal(server.current.content, "mine");
});

test("news that come before a lost save is tried again are no conflict with it, though the server stores it otherwise", async () => {
  const { open, server } = world({ title: "Q3" });
  const session = await open();
  server.faults = ["lost"];
  session.edit({ title: "Q4 " });
  await session.flush();
  server.current.content = { title: "Q4" };
  await session.reload();
  assert.deepEqual([session.status.name, session.version], ["clean", 1]);
});

test("a retry does not push aside the user's discard", async () => {
  const page = new Page();
  const { open, server } = world("v0");
  const session = await open({ page });
  server.faults = ["down"];
  session.edit("mine");
  await session.flush();
  server.held = true;
  const discarded = session.discard();
  await calm();
  page.dispatchEvent(new Event("focus"));
  await calm();
  server.held = false;
  while (server.waiting.length) await server.release();
  assert.equal(await discarded, true);
  assert.equal(session.content, "v0");
});

test("a poll does not push aside the user's discard", async () => {
  const { open, server } = world("v0");
  const session = await open();
  session.edit("mine");
  server.held = true;
  const discarded = session.discard();
  await calm();
  session.reload();
  server.held = false;
  await server.release();
  assert.equal(await discarded, true);
  assert.equal(session.content, "v0");
});

const conflicting = async (options) => {
  const made = world({ a: 0, b: 0 });
  const session = await made.open({ merge: (base, mine, theirs) => ({ ...theirs, b: mine.b }), ...options });
  session.edit({ a: 0, b: "mine" });
  made.server.write({ a: "theirs", b: 0 });
  await session.flush();
  assert.equal(session.status.name, "conflict");
  return { ...made, session };
};

test("a merge that refuses, fails or cannot fetch leaves the conflict untouched", async () => {
  const { session, server } = await conflicting();
  assert.equal(await session.rebase(() => undefined), false);
  assert.equal(await session.rebase(() => { throw new Error("no"); }), false);
  server.faults = ["down"];
  assert.equal(await session.rebase(), false);
  assert.deepEqual([session.status.name, session.content.b, server.posts.length], ["conflict", "mine", 1]);
});

test("an edit during the fetch takes part in the rebase; one during the merge aborts it", async () => {
  const { session, server } = await conflicting();
  const aborted = session.rebase(async (base, mine, theirs) => {
    session.edit({ a: 0, b: "during the merge" });
    return { ...theirs, b: mine.b };
  });
  assert.equal(await aborted, false);
  assert.deepEqual([session.status.name, session.content.b], ["conflict", "during the merge"]);

  server.held = true;
  const rebased = session.rebase();
  await calm();
  session.edit({ a: 0, b: "during the fetch" });
  server.held = false;
  await server.release();
  assert.equal(await rebased, true);
  assert.deepEqual(server.current.content, { a: "theirs", b: "during the fetch" });
});

test("a second conflict on the rebased save returns to conflict, on the newer base", async () => {
  const { session, server } = await conflicting();
  server.faults = [undefined, (request) => { server.write({ a: "again", b: 0 }); server.faults = []; return server.fetch(request.url, { ...request, body: JSON.stringify(request.body) }); }];
  assert.equal(await session.rebase(), false);
  assert.equal(session.status.name, "conflict");
  assert.deepEqual([session.version, session.theirs.version], [1, 2]);
  assert.equal(await session.rebase(), true);
  assert.deepEqual(server.current.content, { a: "again", b: "mine" });
});

test("a draft without the content it was made from offers no rebase", async () => {
  const { open, storage, timers, url } = world("v4", 4);
  storage.slots.set(slotOf(url, "x"), { version: 2, content: "old", updated: timers.now() });
  const session = await open({ merge: (base, mine) => mine });
  session.recover(session.drafts[0]);
  assert.equal(session.status.name, "conflict");
  assert.equal(session.canRebase, false);
  assert.equal(await session.rebase(), false);
});

test("a recovered draft goes only once it lies in the slot of the session that took it over", async () => {
  const { open, storage, timers, url } = world("v0");
  storage.slots.set(slotOf(url, "x"), { version: 0, content: "typed", updated: timers.now() });
  const session = await open();
  storage.full = true;
  session.recover(session.drafts[0]);
  await calm();
  assert.deepEqual([...storage.slots.keys()], [slotOf(url, "x")]);
  storage.full = false;
  session.stage("typed on");
  await calm();
  assert.deepEqual(storage.contents(), ["typed on"]);
});

test("a draft that its tab went on writing since it was listed outlives its recovery and its dismissal", async () => {
  const { open, storage, timers } = world("v0");
  const [alive, other] = [await open(), await open({ tab: 1 })];
  alive.edit("he");
  await calm();
  await other.reload();
  const [listed] = other.drafts;
  timers.time += 10;
  alive.edit("hello");
  await calm();

  other.dismiss(listed);
  await calm();
  assert.deepEqual(storage.contents(), ["hello"]);
  timers.time += 10;
  alive.edit("hello there");
  await calm();
  assert.equal(other.recover(other.drafts[0]), true);
  await calm();
  assert.deepEqual(storage.contents().sort(), ["hello", "hello there"]);
});

test("opened twice it is one session, until the last one closes; then a new one", async () => {
  const { open, server } = world();
  const one = await open();
  const two = await open();
  assert.equal(one, two);
  one.edit("mine");
  await one.close();
  assert.equal(server.current.content, "mine");
  two.edit("still open");
  await two.close();
  assert.equal(server.current.content, "still open");
  assert.throws(() => two.edit("too late"), TypeError);
  const three = await open();
  assert.notEqual(three, two);
  assert.notEqual(await open({ user: "erin" }), three);
});

test("closed with unsaved work it lives on, saves when it can, and is found again", async () => {
  const { open, server, storage, timers } = world();
  const session = await open();
  server.faults = ["down"];
  session.edit("mine");
  assert.equal(await session.close(), false);
  assert.equal(await open(), session);
  await session.close();
  await timers.advance(2000);
  assert.equal(server.current.content, "mine");
  assert.equal(storage.slots.size, 0);
  assert.notEqual(await open(), session);
});

test("the page that hides saves at once, so that leaving may cut nothing: small bodies outlive it, large ones do not", async () => {
  const page = new Page();
  const { open, server } = world();
  const session = await open({ page });
  session.edit("small");
  page.hide();
  await calm();
  assert.deepEqual([server.current.content, server.posts[0].keepalive], ["small", true]);

  session.edit("é".repeat(30_000));
  page.dispatchEvent(new Event("pagehide"));
  await calm();
  assert.deepEqual([server.current.version, server.posts[1].keepalive], [2, false]);
});

test("leaving does not send anew what was refused, but what was typed since", async () => {
  const page = new Page();
  const { open, server } = world();
  const session = await open({ page });
  server.faults = [problem(413, {})];
  session.edit("far too long");
  await session.flush();
  page.hide();
  page.dispatchEvent(new Event("pagehide"));
  await calm();
  assert.equal(server.posts.length, 1);
  session.edit("short");
  page.hide();
  await calm();
  assert.equal(server.current.content, "short");
});

test("two documents share what a closing page may leave behind", async () => {
  const page = new Page();
  const [one, two] = [world(), world()];
  const sessions = [await one.open({ page }), await two.open({ page })];
  sessions.forEach((session) => session.edit("x".repeat(40_000)));
  page.hide();
  await calm();
  assert.deepEqual([one.server.posts[0].keepalive, two.server.posts[0].keepalive], [true, false]);
  sessions[1].edit("x".repeat(40_000));
  page.hide();
  await calm();
  assert.equal(two.server.posts[1].keepalive, true, "what came back makes room");
});

test("leaving asks only where no copy is kept, or the user has to decide", async () => {
  const page = new Page();
  const { open, server, storage } = world();
  const session = await open({ page });
  session.edit("mine");
  await calm();
  assert.equal(page.asks(), false);
  storage.full = true;
  session.edit("more");
  await calm();
  assert.equal(page.asks(), true);
  storage.full = false;
  server.write("theirs");
  await session.flush();
  assert.equal(page.asks(), true);
});

test("leaving asks before the text of a deleted document goes: no later session can offer its draft", async () => {
  const page = new Page();
  const { open, server } = world();
  const session = await open({ page });
  server.gone = true;
  session.edit("mine");
  await session.flush();
  assert.equal(session.status.name, "gone");
  assert.equal(page.asks(), true);
});

test("back in front, or online again, the page looks for news and tries at once what waits", async () => {
  const page = new Page();
  const { open, server } = world("v0");
  const session = await open({ page });
  server.write("v1");
  page.dispatchEvent(new Event("focus"));
  await calm();
  assert.equal(session.content, "v1");
  server.faults = ["down"];
  session.edit("mine");
  await session.flush();
  page.dispatchEvent(new Event("online"));
  await calm();
  assert.equal(session.status.name, "clean");
});

test("every 30 s it looks for news, but not for a user who is signed out nor in a hidden page", async () => {
  const page = new Page();
  const { open, server, timers } = world("v0");
  const session = await open({ page });
  server.write("v1");
  await timers.advance(30_000);
  assert.equal(session.content, "v1");
  page.document.hidden = true;
  await timers.advance(60_000);
  assert.equal(server.gets.length, 2);
  page.document.hidden = false;
  server.faults = [problem(401, {})];
  await timers.advance(30_000);
  assert.equal(session.status.name, "blocked");
  await timers.advance(90_000);
  assert.equal(server.gets.length, 3);
});

test("tabs tell each other what they saved", async () => {
  const { open, channels } = world("v0");
  const channel = channels.open;
  const [one, two] = [await open({ channel }), await open({ tab: 1, channel })];
  one.edit("mine");
  await one.flush();
  await calm();
  assert.deepEqual([two.content, two.version], ["mine", 1]);
});

test("one tab writes; the other keeps what is typed to itself until it takes over, for which the first saves", async () => {
  const { open, server, storage, timers, channels } = world("v0");
  const shared = { channel: channels.open, locks: new Locks() };
  const [one, two] = [await open(shared), await open({ tab: 1, ...shared })];
  assert.deepEqual([one.status.name, two.status.name], ["clean", "readonly_tab"]);

  one.edit("mine");
  await two.takeOver();
  assert.equal(server.current.content, "mine", "saved before it was taken");
  assert.deepEqual([one.status.name, two.status.name, two.content], ["readonly_tab", "clean", "mine"]);
  two.edit("two's");
  assert.equal(await two.flush(), true);

  await calm();
  one.edit("typed all the same");
  assert.equal(await one.flush(), false, "not this tab's turn");
  await timers.advance(20_000);
  assert.equal(server.current.content, "two's");
  assert.deepEqual(storage.contents(), ["typed all the same"]);
  assert.equal(one.status.detail.unsaved, true);
});

test("a tab that could not save and was taken over says so, and saves once it writes again", async () => {
  const { open, server, timers, channels } = world("v0");
  const shared = { channel: channels.open, locks: new Locks() };
  const [one, two] = [await open(shared), await open({ tab: 1, ...shared })];
  one.edit("mine");
  server.faults = ["down", "down"];
  await one.flush();
  assert.equal(one.status.name, "retrying");
  await two.takeOver();
  await calm();
  assert.deepEqual([one.status.name, one.status.detail.unsaved], ["readonly_tab", true]);
  await two.close();
  await timers.advance(1500);
  assert.deepEqual([one.status.name, server.current.content], ["clean", "mine"]);
});

test("when the writing tab closes, the next one writes", async () => {
  const { open, server, timers, channels } = world("v0");
  const shared = { channel: channels.open, locks: new Locks() };
  const [one, two] = [await open(shared), await open({ tab: 1, ...shared })];
  await one.close();
  await calm();
  assert.equal(two.status.name, "clean");
  two.edit("mine");
  await timers.advance(1500);
  assert.equal(server.current.content, "mine");
});

test("a tab that closes leaves no request for the lock behind", async () => {
  const { open } = world("v0");
  const locks = new Locks();
  await open({ locks });
  for (let times = 0; times < 3; times++) {
    const two = await open({ tab: 1, locks });
    assert.equal(locks.waiting, 1);
    await two.close();
    await calm();
  }
  assert.equal(locks.waiting, 0);
});

test("a frozen tab does not hold up a take-over, and its own late save is refused", async () => {
  const { open, server, timers } = world("v0");
  const locks = new Locks();
  const frozen = await open({ locks, channel: () => ({ postMessage() {}, close() {} }) });
  const two = await open({ tab: 1, locks, channel: new Channels().open });
  frozen.edit("frozen");
  const taken = two.takeOver();
  await timers.advance(1000);
  assert.equal(two.status.name, "readonly_tab");
  await timers.advance(10_000);
  await taken;
  assert.equal(frozen.status.name, "readonly_tab");
  two.edit("two's");
  assert.equal(await two.flush(), true);
});

test("where locks are refused, versions alone keep it safe", async () => {
  const { open } = world("v0");
  const session = await open({ locks: { request: async () => { throw Object.assign(new Error(), { name: "SecurityError" }); } } });
  session.edit("mine");
  assert.equal(await session.flush(), true);
});

test("where channels are refused, versions alone keep it safe", async () => {
  const { open } = world("v0");
  const session = await open({ channel: () => { throw Object.assign(new Error(), { name: "SecurityError" }); } });
  session.edit("mine");
  assert.equal(await session.flush(), true);
});

test("a slot that was written again since it was looked at is not dropped", async () => {
  const { open, server, storage, timers, url } = world("v0");
  const id = slotOf(url, "alive");
  storage.slots.set(id, { version: 0, content: "same", updated: timers.now() });
  server.write("same");
  const { remove } = storage;
  storage.remove = (...asked) => {
    if (asked[0] == id) storage.slots.set(id, { version: 0, content: "typed on", updated: timers.now() + 1 });
    remove.apply(storage, asked);
  };
  await open();
  assert.deepEqual(storage.contents(), ["typed on"]);
});

test("drafts of 30 days ago are gone, whosever they are", async () => {
  const { open, storage, timers, url } = world();
  const day = 86_400_000;
  timers.time = 40 * day;
  storage.slots.set(slotOf(url, "old"), { version: 0, content: "old", updated: 10 * day - 1 });
  storage.slots.set(slotOf("elsewhere", "old"), { version: 0, content: "old", updated: 10 * day - 1 });
  storage.slots.set(slotOf(url, "young"), { version: 0, content: "young", updated: 10 * day });
  const session = await open();
  assert.deepEqual(session.drafts.map(({ content }) => content), ["young"]);
  assert.deepEqual(storage.contents(), ["young"]);
});

test("signing out ends the user's sessions and removes their drafts, and nobody else's", async () => {
  const { open, server, storage, timers } = world();
  const { clearDrafts } = await tab();
  const [dana, dan] = [await open(), await open({ user: "dan" })];
  dana.edit("private");
  dan.edit("dan's");
  await clearDrafts("dan", new Storage());
  await clearDrafts("dana", storage);
  assert.deepEqual(storage.contents(), ["dan's"]);
  await timers.advance(5000);
  assert.equal(server.posts.length, 0, "signed out, nothing is sent");
  assert.throws(() => dana.edit("more"), TypeError);
  assert.notEqual(await open(), dana);
});

test("without a user nothing is opened: drafts could not be kept apart", async () => {
  const { openDocument } = await tab();
  assert.throws(() => openDocument("/briefs/42", {}), TypeError);
  assert.throws(() => openDocument("/briefs/42"), TypeError);
});

test("ids with slashes and percent signs stay apart", async () => {
  const { open, storage } = world();
  const session = await open({ user: "a/b", url: "https://notes.example/c" });
  session.edit("private");
  await calm();
  const other = await open({ tab: 1, user: "a", url: "https://notes.example/b/c" });
  const encoded = await open({ tab: 1, user: "a%2Fb", url: "https://notes.example/c" });
  assert.deepEqual([other.drafts, encoded.drafts], [[], []]);
  const same = await open({ tab: 1, user: "a/b", url: "https://notes.example/c" });
  assert.equal(same.drafts.length, 1);
  assert.equal(storage.slots.size, 1);
});

test("headers are asked for at every request, and a query stays with the address", async () => {
  const { open, server } = world();
  let calls = 0;
  const session = await open({ url: "https://notes.example/briefs/7?tenant=1", headers: async () => ({ "X-CSRF-Token": `${++calls}` }) });
  session.edit("mine");
  await session.flush();
  assert.deepEqual(server.sent.map(({ url, headers }) => [url, headers["X-CSRF-Token"]]), [
    ["https://notes.example/briefs/7?tenant=1", "1"], ["https://notes.example/briefs/7/versions?tenant=1", "2"]]);
  assert.equal(server.posts[0].headers["Content-Type"], "application/json");
});

test("without IndexedDB drafts lie in localStorage, written before edit returns", async () => {
  const { open, url } = world();
  const values = new Map();
  const local = { setItem: (id, text) => values.set(id, text), removeItem: (id) => values.delete(id) };
  globalThis.localStorage = new Proxy(local, {
    ownKeys: () => [...values.keys()],
    getOwnPropertyDescriptor: (_, id) => values.has(id) ? { value: values.get(id), enumerable: true, configurable: true } : undefined,
    get: (target, id) => target[id] ?? values.get(id),
  });
  try {
    const dead = await open({ storage: undefined });
    dead.edit("typed");
    assert.equal(values.size, 1);
    values.set(slotOf(url, "bad"), "{");
    const session = await open({ tab: 1, storage: undefined });
    assert.deepEqual(session.drafts.map(({ content }) => content), ["typed"]);
    assert.equal(session.malformed.length, 1);
    session.dismiss({ ...session.drafts[0], updated: 1 });
    assert.equal(values.size, 2);
    const { clearDrafts } = await tab();
    await clearDrafts("dana");
    assert.equal(values.size, 0);
  } finally {
    delete globalThis.localStorage;
  }
});

test("drafts lie in IndexedDB; where it does not open that is said, and the next edit tries again", async () => {
  const { open } = world();
  const databases = (globalThis.indexedDB = new Databases());
  const values = (globalThis.localStorage = { setItem: (id, text) => (values[id] = text) });
  try {
    databases.failing = true;
    const session = await open({ storage: undefined, tab: 3 });
    session.edit("one");
    await calm();
    assert.equal(session.status.detail.backupFailed, true);
    assert.deepEqual(Object.keys(values), ["setItem"], "no copy where no later page and no signing out looks");

    databases.failing = false;
    session.edit("two");
    await calm();
    assert.equal(session.status.detail.backupFailed, false);
    assert.deepEqual([...databases.values.values()].map(({ content }) => content), ["two"]);
    const later = await open({ storage: undefined, tab: 1 });
    await calm();
    assert.deepEqual(later.drafts.map(({ content }) => content), ["two"]);
    const { clearDrafts } = await tab(1);
    await clearDrafts("dana");
    assert.equal(databases.values.size, 0);
  } finally {
    delete globalThis.localStorage;
    delete globalThis.indexedDB;
  }
});

test("a page that deletes all databases blocks no draft: not its own wait for ours, nor ours for it", async () => {
  const { open } = world();
  const databases = (globalThis.indexedDB = new Databases());
  try {
    const session = await open({ storage: undefined, tab: 4 });
    session.edit("one");
    await calm();
    databases.deleteDatabase();
    await calm();
    assert.equal(databases.values.size, 0);
    session.edit("two");
    const later = await open({ storage: undefined, tab: 2 });
    later.edit("three");
    await calm();
    assert.deepEqual([...databases.values.values()].map(({ content }) => content).sort(), ["three", "two"]);
  } finally {
    delete globalThis.indexedDB;
  }
});

test("outside secure contexts there is no randomUUID, and ids are made all the same", async () => {
  const { open, server } = world();
  const { randomUUID } = crypto;
  Object.defineProperty(crypto, "randomUUID", { value: undefined, configurable: true, writable: true });
  try {
    const session = await open();
    session.edit("mine");
    await session.flush();
    assert.match(server.posts[0].body.save_id, /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  } finally {
    crypto.randomUUID = randomUUID;
  }
});
