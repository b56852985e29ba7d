/**
 * Any order of edits, answers, losses, reloads and second thoughts: unless the user discarded it, the last edit is
 * pending, on the server or in a draft; never clean without an answer; one save at a time; the versions form a chain.
 */

import assert from "node:assert/strict";
import test from "node:test";

import { calm, json, problem, tab, world } from "./world.mjs";

const SEED = Number(process.env.DURABLE_SEED ?? Math.floor(Math.random() * 2 ** 31));
const TIMES = Number(process.env.DURABLE_INTERLEAVINGS ?? 1000);
const STEPS = 20;
const TABS = 2;

/** A small generator of random numbers with a seed: mulberry32. */
const generator = (seed) => () => {
  seed = (seed + 0x6d2b79f5) | 0;
  let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
};

const FAULTS = [
  "down", "lost", "throw", "silence",
  () => problem(401, { reason: "signed-out" }), () => problem(422, { detail: "title is too long" }),
  () => problem(429, {}, { "Retry-After": "3" }), () => problem(500, {}), () => problem(503, {}),
  () => json(200, { surprise: true }), () => new Response("<p>Sign in", { status: 200 }),
];

async function interleave(seed, trace) {
  const random = generator(seed);
  const pick = (list) => list[Math.floor(random() * list.length)];
  const { open, server, storage, timers } = world({ edit: "first" });
  const modules = await Promise.all([...Array(TABS).keys()].map(tab));
  const merge = (base, mine, theirs) => pick([mine, { ...theirs, ...mine }, undefined]);
  const sessions = [];
  for (let number = 0; number < TABS; number++) {
    if (random() < 0.3) server.faults = [pick(FAULTS)];
    sessions.push(await open({ tab: number, merge }));
  }
  const last = sessions.map(() => undefined);
  const staged = sessions.map(() => false);
  // Whose slot another tab took over, by the user's own act, until it writes again.
  const retired = sessions.map(() => false);
  let edits = 0;

  const known = (content) => JSON.stringify(content);
  const check = (number) => {
    const session = sessions[number];
    const { status } = session;
    assert.ok(Math.max(...server.most) <= 1, "two saves of one session in flight");
    server.chain.forEach((row, at) => assert.equal(row.version, at, "a gap in the chain of versions"));
    const written = server.chain.map(({ content }) => known(content));
    if (last[number] !== undefined) {
      const edit = known(last[number]);
      const safe = known(session.content) == edit || written.includes(edit) || storage.contents().map(known).includes(edit);
      assert.ok(safe, "the last edit is nowhere");
      if (status.name == "clean" || (!status.detail.unsaved && status.name != "conflict"))
        assert.ok(staged[number] || written.includes(edit), "clean, and the last edit is not on the server");
    }
    if (status.detail.unsaved && !status.detail.backupFailed && !retired[number])
      assert.ok([...storage.contents().map(known), ...written].includes(known(session.content)), "unsaved, and no draft of it");
  };

  for (let step = 0; step < STEPS; step++) {
    const number = Math.floor(random() * TABS);
    const session = sessions[number];
    const act = pick(["edit", "edit", "edit", "stage", "time", "time", "flush", "reload", "release", "release", "hold",
      "fault", "write", "discard", "rebase", "recover", "full", "race"]);
    trace.push(`${number}:${act}`);
    const forget = (merged) => {
      // The user's own word: what the session shows now is what must be kept.
      last[number] = merged ? session.content : undefined;
      staged[number] = false;
    };
    if (act == "edit" || act == "race") {
      if (act == "race") session.reload();
      if (session.edit({ edit: ++edits, by: number })) [last[number], staged[number], retired[number]] = [session.content, false, false];
    } else if (act == "stage") {
      if (session.stage({ staged: ++edits, by: number })) [last[number], staged[number], retired[number]] = [session.content, true, false];
    } else if (act == "time") await timers.advance(pick([100, 1500, 5000, 16_000]));
    else if (act == "flush") session.flush();
    else if (act == "reload") session.reload();
    else if (act == "release") {
      server.held = false;
      while (server.waiting.length) await server.release(random() < 0.5);
    } else if (act == "hold") server.held = true;
    else if (act == "fault") server.faults.push(pick(FAULTS));
    else if (act == "write") server.write({ edit: ++edits, by: "somebody else" });
    else if (act == "full") storage.full = !storage.full;
    else if (act == "recover") {
      if (session.drafts.length && session.recover(session.drafts[0])) {
        forget(true);
        retired[1 - number] = true;
      }
    } else {
      server.held = false;
      while (server.waiting.length) await server.release();
      const discarded = act == "discard" ? session.discard() : session.rebase();
      if (random() < 0.3 && session.edit({ edit: ++edits, by: number })) [last[number], staged[number], retired[number]] = [session.content, false, false];
      let done;
      discarded.then((value) => (done = value));
      await calm();
      if (done === undefined) await timers.advance(16_000);
      if (act == "discard" && done) forget(false);
      if (act == "rebase" && done) forget(true);
    }
    await calm();
    sessions.forEach((_, at) => check(at));
  }

  // The world is well again: what is not in conflict ends on the server.
  [server.held, server.faults, storage.full] = [false, [], false];
  while (server.waiting.length) await server.release();
  await timers.advance(20_000);
  for (const [number, session] of sessions.entries()) {
    await session.reload();
    await session.flush();
    check(number);
    const { name, detail } = session.status;
    assert.ok(name == "conflict" || name == "clean" || detail.unsaved, `ended ${name}`);
    if (name == "dirty") assert.ok(staged[number], "dirty for ever");
  }
}

test(`${TIMES} random interleavings lose no edit (seed ${SEED})`, async (context) => {
  context.diagnostic(`seed ${SEED}: repeat with DURABLE_SEED=${SEED}`);
  for (let time = 0; time < TIMES; time++) {
    const trace = [];
    try {
      await interleave(SEED + time, trace);
    } catch (error) {
      error.message += ` after ${trace.join(" ")}`;
      error.message += ` (repeat with DURABLE_SEED=${SEED + time} DURABLE_INTERLEAVINGS=1)`;
      throw error;
    }
  }
});
