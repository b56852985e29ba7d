/** The numbered cases of the contract of documents that the browser decides. */

import assert from "node:assert/strict";
import test from "node:test";

import { calm, heard, json, problem, tab, world } from "./world.mjs";

test("1. two quick edits: a draft of each at once, one save after 1.5 s with the second", async () => {
  const { open, server, storage, timers } = world();
  const session = await open();

  session.edit({ title: "one" });
  await calm();
  session.edit({ title: "two" });
  await calm();

  assert.deepEqual(storage.puts.map(([, slot]) => slot.content.title), ["one", "two"]);
  await timers.advance(1499);
  assert.equal(server.posts.length, 0);
  assert.equal(session.status.name, "dirty");
  await timers.advance(1);
  assert.equal(server.posts.length, 1);
  const { expected_version, content } = server.posts[0].body;
  assert.deepEqual([expected_version, content], [0, { title: "two" }]);
  assert.equal(session.status.name, "clean");
  assert.deepEqual([session.version, storage.slots.size], [1, 0]);
});

test("2. an edit during a save: one request at a time, the second on version 1", async () => {
  const { open, server, timers } = world();
  const session = await open();
  session.edit("one");
  server.held = true;
  const flushed = session.flush();
  await calm();

  session.edit("two");
  await timers.advance(2000);

  assert.equal(server.posts.length, 1);
  server.held = false;
  const unsaved = [];
  session.addEventListener("saved", () => unsaved.push(session.status.detail.unsaved));
  await server.release();
  assert.equal(await flushed, true);
  assert.deepEqual(server.posts.map(({ body }) => [body.expected_version, body.content]), [[0, "one"], [1, "two"]]);
  assert.deepEqual(unsaved, [true, false]);
  assert.deepEqual(server.most, [1]);
  assert.equal(session.status.name, "clean");
});

test("3. a save that the network rejects keeps all, and the next flush sends the same on the same base", async () => {
  const { open, server, storage } = world();
  const session = await open();
  session.edit("mine");
  server.faults = ["down"];

  assert.equal(await session.flush(), false);

  assert.equal(session.status.name, "retrying");
  assert.equal(session.status.detail.unsaved, true);
  assert.deepEqual(storage.contents(), ["mine"]);
  assert.equal(await session.flush(), true);
  assert.deepEqual(server.posts[1].body, server.posts[0].body);
  assert.equal(session.status.name, "clean");
  assert.equal(storage.slots.size, 0);
});

test("4. a failed first load: edits are ignored, flush sends nothing, a later load enables both", async () => {
  const { open, server, storage } = world("stored");
  server.faults = [problem(500, {})];
  const session = await open();

  assert.equal(session.edit("empty"), false);
  session.stage("empty");
  assert.equal(await session.flush(), false);

  assert.deepEqual([server.posts.length, storage.slots.size, session.content], [0, 0, undefined]);
  assert.notEqual(session.status.name, "clean");
  assert.equal(await session.reload(), true);
  assert.equal(session.content, "stored");
  assert.equal(session.edit("mine"), true);
  assert.equal(await session.flush(), true);
  assert.equal(server.current.content, "mine");
});

test("6. a refresh waits for the save in flight: no false conflict", async () => {
  const { open, server } = world();
  const session = await open();
  session.edit("mine");
  server.held = true;
  session.flush();
  await calm();
  const events = heard(session);

  const reloaded = session.reload();
  await calm();

  assert.equal(server.gets.length, 1, "only the first load");
  server.held = false;
  await server.release();
  assert.equal(await reloaded, true);
  assert.equal(server.gets.length, 2);
  assert.equal(session.status.name, "clean");
  assert.deepEqual(events.filter(([type]) => type == "conflict"), []);
});

test("7. reads answered out of order, and a read that raced an edit, are dropped", async () => {
  const { open, server } = world("v0");
  const session = await open();
  server.held = true;
  server.faults = [() => json(200, { version: 1, content: "older" }), () => json(200, { version: 2, content: "newer" })];
  session.reload();
  await calm();
  session.reload();
  await calm();

  await server.release(true);
  await server.release();

  assert.deepEqual([session.version, session.content], [2, "newer"]);

  server.faults = [() => json(200, { version: 3, content: "raced" })];
  const reloaded = session.reload();
  await calm();
  session.edit("mine");
  await server.release();
  await reloaded;
  assert.deepEqual([session.version, session.content, session.status.name], [2, "mine", "dirty"]);
});

test("8. two tabs from version 0: one wins, the other is in conflict and keeps its edits to itself", async () => {
  const { open, server, storage, timers } = world();
  const [one, two] = [await open(), await open({ tab: 1 })];
  one.edit("one");
  two.edit("two");

  assert.equal(await one.flush(), true);
  assert.equal(await two.flush(), false);
  two.edit("two and more");
  await timers.advance(60_000);

  assert.equal(two.status.name, "conflict");
  assert.deepEqual([two.theirs.version, two.theirs.content], [1, "one"]);
  assert.equal(server.posts.length, 2);
  assert.equal(server.current.version, 1);
  assert.equal(two.content, "two and more");
  assert.deepEqual(storage.contents(), ["two and more"]);
});

test("9. a tab that clears its draft leaves the others', and other users and documents see none", async () => {
  const { open, storage, url } = world();
  const [one, two] = [await open(), await open({ tab: 1 })];
  one.edit("one");
  two.stage("two");
  await calm();

  two.stage(undefined);
  await calm();

  assert.deepEqual(storage.contents(), ["one"]);
  const [own] = storage.slots.keys();
  one.dismiss({ id: own });
  await calm();
  assert.deepEqual(storage.contents(), ["one"], "never the own slot, even if asked");
  const third = await open({ tab: 2 });
  assert.deepEqual(third.drafts.map(({ content }) => content), ["one"]);
  const [erin, other] = [await open({ user: "erin" }), await open({ url: `${url}/part` })];
  assert.deepEqual([erin.drafts, other.drafts], [[], []]);
  other.dismiss({ id: own });
  erin.dismiss({ id: own });
  await calm();
  assert.deepEqual(storage.contents(), ["one"]);
});

test("10. a malformed slot is skipped, the others listed; it can be dismissed", async () => {
  const { open, storage, timers, url } = world();
  const slot = (name) => ["durable", "dana", url, name].map(encodeURIComponent).join("/");
  const bad = [null, 7, { version: "0", content: 1, updated: 1 }, { version: 0, updated: timers.now() }, { version: -1, content: 1, updated: 1 }];
  bad.forEach((value, number) => storage.slots.set(slot(`bad ${number}`), value));
  storage.slots.set(slot("old"), { version: 0, content: "older", updated: timers.now() - 2000 });
  storage.slots.set(slot("new"), { version: 0, content: "newer", updated: timers.now() - 1000 });

  const session = await open();

  assert.deepEqual(session.drafts.map(({ content }) => content), ["newer", "older"]);
  assert.equal(session.malformed.length, bad.length);
  session.dismiss(session.malformed[0]);
  await calm();
  assert.equal(session.malformed.length, bad.length - 1);
  assert.equal(storage.slots.has(slot("bad 0")), false);
});

test("11. a recovered draft of an older version is a conflict, one of the current version saves", async () => {
  const { open, server, storage, timers, url } = world("v4", 4);
  const slot = (name) => ["durable", "dana", url, name].map(encodeURIComponent).join("/");
  storage.slots.set(slot("stale"), { version: 2, content: "stale", base: "v2", updated: timers.now() - 1 });
  storage.slots.set(slot("good"), { version: 4, content: "good", base: "v4", updated: timers.now() });
  const session = await open();
  const [good, stale] = session.drafts;

  assert.equal(session.recover(stale), true);
  await timers.advance(20_000);

  assert.equal(session.status.name, "conflict");
  assert.deepEqual([session.content, session.version, server.posts.length], ["stale", 2, 0]);
  assert.deepEqual(storage.contents().sort(), ["good", "stale"], "moved to the slot of this session");
  assert.equal(storage.slots.has(slot("stale")), false);
  assert.equal(await session.discard(), true);

  assert.equal(session.recover(good), true);
  await timers.advance(1500);
  assert.equal(session.status.name, "clean");
  assert.deepEqual([server.current.version, server.current.content], [5, "good"]);
  assert.deepEqual([session.drafts, storage.slots.size], [[], 0]);
  assert.equal(session.recover(good), false, "not offered again");
});

test("12. to recover while dirty or saving is ignored", async () => {
  const { open, server, storage, timers, url } = world();
  const id = ["durable", "dana", url, "x"].map(encodeURIComponent).join("/");
  storage.slots.set(id, { version: 0, content: "draft", updated: timers.now() });
  const session = await open();
  const [draft] = session.drafts;

  session.edit("mine");
  assert.equal(session.recover(draft), false);
  assert.equal(session.content, "mine");
  server.held = true;
  session.flush();
  await calm();
  assert.equal(session.recover(draft), false);
  server.held = false;
  await server.release();
  assert.equal(server.current.content, "mine");
  assert.equal(storage.slots.has(id), true);
});

test("14. staged typing survives an earlier save, and clearing it makes the session clean", async () => {
  const { open, server, storage } = world();
  const session = await open();
  session.edit("saved");
  server.held = true;
  const flushed = session.flush();
  await calm();
  session.stage("half a wo");
  server.held = false;
  await server.release();
  await flushed;

  assert.equal(session.status.detail.unsaved, true);
  assert.equal(session.status.name, "dirty");
  const [slot] = storage.slots.values();
  assert.deepEqual([slot.version, slot.content], [1, "half a wo"]);
  assert.equal(server.posts.length, 1, "staged text is never sent");
  session.stage(undefined);
  await calm();
  assert.deepEqual([session.status.name, session.content, storage.slots.size], ["clean", "saved", 0]);
});

test("15. a full draft storage is shown, and the save succeeds all the same", async () => {
  const { open, server, storage } = world();
  const session = await open();
  storage.full = true;

  session.edit("mine");
  await calm();

  assert.equal(session.status.detail.backupFailed, true);
  assert.match(session.status.label, /No copy is kept/);
  assert.equal(await session.flush(), true);
  assert.equal(server.current.content, "mine");
  assert.equal(session.status.name, "clean");
});

test("16. unsubscribing cancels nothing, and closing inside the debounce window saves", async () => {
  const { open, server } = world();
  const session = await open();
  const listener = () => {};
  session.addEventListener("status", listener);
  session.edit("one");
  session.removeEventListener("status", listener);
  assert.equal(await session.flush(), true);
  assert.equal(server.current.content, "one");

  session.edit("two");
  assert.equal(await session.close(), true);
  assert.equal(server.current.content, "two");
});

test("17. a transport that raises synchronously does not wedge the queue", async () => {
  const { open, server } = world();
  const session = await open();
  session.edit("mine");
  server.faults = ["throw"];

  assert.equal(await session.flush(), false);
  assert.equal(session.status.detail.saving, false);
  assert.equal(await session.flush(), true);
  assert.equal(server.current.content, "mine");
});

const byId = (base, mine, theirs) => {
  const merged = new Map(theirs.map((row) => [row.id, row]));
  for (const row of mine) {
    const before = base.find(({ id }) => id == row.id);
    if (JSON.stringify(before) != JSON.stringify(row)) merged.set(row.id, row);
  }
  return [...merged.values()];
};

test("22. a rebase: merged by id, saved on the stored version, both sides' edits present", async () => {
  const { open, server } = world([{ id: 1, text: "a" }, { id: 2, text: "b" }], 3);
  const session = await open({ merge: byId });
  server.write([{ id: 1, text: "theirs" }, { id: 2, text: "b" }]);
  session.edit([{ id: 1, text: "a" }, { id: 2, text: "mine" }]);
  assert.equal(await session.flush(), false);
  assert.equal(session.canRebase, true);
  assert.equal(server.posts.length, 1, "no rebase of its own accord");

  assert.equal(await session.rebase(), true);

  assert.equal(session.status.name, "clean");
  assert.equal(server.current.version, 5);
  assert.deepEqual(server.current.content, [{ id: 1, text: "theirs" }, { id: 2, text: "mine" }]);
  assert.deepEqual(session.content, server.current.content);
});

test("24. without a merge no rebase is offered", async () => {
  const { open, server } = world();
  const session = await open();
  session.edit("mine");
  server.write("theirs");
  await session.flush();

  assert.equal(session.status.name, "conflict");
  assert.equal(session.canRebase, false);
  assert.equal(await session.rebase(), false);
  assert.deepEqual([session.status.name, session.content, server.posts.length], ["conflict", "mine", 1]);
});

test("25. a lost acknowledgement: the retry names the same save, and is answered by it", async () => {
  const { open, server, timers } = world();
  const session = await open();
  const events = heard(session);
  session.edit("mine");
  server.faults = ["lost"];

  assert.equal(await session.flush(), false);
  assert.equal(session.status.name, "retrying", "never clean before an answer");
  await timers.advance(1000);

  assert.equal(session.status.name, "clean");
  assert.equal(server.posts[0].body.save_id, server.posts[1].body.save_id);
  assert.match(server.posts[0].body.save_id, /^[0-9a-f]{8}-[0-9a-f]{4}-4/);
  assert.deepEqual([server.current.version, session.version], [1, 1]);
  assert.deepEqual(events.filter(([type]) => type == "conflict"), []);
});

test("25. without a save id at the server, equal content is known as the own write, whatever the order of its keys", async () => {
  const { open, server } = world();
  const session = await open();
  session.edit({ a: 1, b: [{ c: null, d: "x" }] });
  server.faults = ["lost"];
  await session.flush();
  Object.assign(server.current, { save_id: null, content: { b: [{ d: "x", c: null }], a: 1 } });

  assert.equal(await session.flush(), true);
  assert.deepEqual([session.status.name, session.version, server.current.version], ["clean", 1, 1]);
});

test("25. a newer edit after a lost answer goes on upon the own write", async () => {
  const { open, server } = world();
  const session = await open();
  session.edit("one");
  server.faults = ["lost", "down"];
  await session.flush();
  session.edit("two");
  await session.flush();
  session.edit("three");

  assert.equal(await session.flush(), true);
  assert.deepEqual(server.chain.map(({ content }) => content).slice(1), ["one", "three"]);
  assert.equal(session.version, 2);
});

test("25. a refresh that finds the own write is no conflict either", async () => {
  const { open, server } = world();
  const session = await open();
  session.edit("one");
  server.faults = ["lost"];
  await session.flush();

  await session.reload();
  assert.deepEqual([session.status.name, session.version], ["clean", 1]);

  session.edit("two");
  server.faults = ["lost"];
  await session.flush();
  server.write("erin's");
  await session.reload();
  assert.equal(session.status.name, "conflict", "somebody wrote after it");
});

test("26. a page that died after its draft: the next session offers it and applies nothing", async () => {
  const { open, server } = world("stored");
  const dead = await open({ fetch: (url, init) => (init.method == "POST" ? new Promise(() => {}) : server.fetch(url, init)) });
  dead.edit("typed");
  await calm();

  const session = await open({ tab: 1 });

  assert.deepEqual(session.drafts.map(({ content, version }) => [content, version]), [["typed", 0]]);
  assert.equal(session.content, "stored");
  assert.equal(session.status.name, "clean");
  assert.equal(session.status.detail.drafts, 1);
  assert.equal(server.posts.length, 0);
});

test("27. a page that died between commit and answer: an equal draft is passed over, a different one is a conflict", async () => {
  const { open, server, storage, timers, url } = world("stored");
  const id = ["durable", "dana", url, "dead"].map(encodeURIComponent).join("/");
  storage.slots.set(id, { version: 0, content: { b: 2, a: 1 }, base: "stored", updated: timers.now() });
  server.write({ a: 1, b: 2 });
  const session = await open();
  assert.deepEqual([session.drafts, storage.slots.size], [[], 0], "dropped: it is saved");

  storage.slots.set(id, { version: 0, content: { b: 2, a: 1 }, base: "stored", updated: timers.now() });
  server.write({ a: 1, b: 3 });
  await session.reload();
  assert.equal(session.drafts.length, 1);
  session.recover(session.drafts[0]);
  await timers.advance(10_000);
  assert.equal(session.status.name, "conflict");
  assert.deepEqual([server.posts.length, server.current.version], [0, 2]);
});
