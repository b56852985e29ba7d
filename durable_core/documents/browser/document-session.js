/**
 * One versioned document in one page: edits wait in a queue, each save names the version it was made from, and nothing
 * typed is lost. A pure reducer decides, the session below it acts. It handles JSON values: undo, cursor and rendering
 * stay with the editor. Answers arriving late, lost or doubled are settled by `save_id` and by comparing content.
 *
 * @typedef {any} Json
 * @typedef {{content: Json, saveId: string}} Snapshot
 * @typedef {{version: number, content: Json, savedBy?: string | null, savedAt?: string | null}} Stored
 * @typedef {{version: number, content: Json, base?: Json, save_id?: string, updated: number}} Slot
 * @typedef {Slot & {id: string}} Draft Unsaved work that another session of this user left or still has.
 * @typedef {"unloaded" | "clean" | "dirty" | "saving" | "offline" | "retrying" | "conflict" | "readonly_tab" | "blocked"
 *   | "gone"} StatusName
 * @typedef {{of: "read" | "save", name: StatusName, status?: number, reason?: string, detail?: string,
 *   retryAt?: number}} Failure
 * @typedef {Failure & {unsaved: boolean, saving: boolean, conflict: boolean, backupFailed: boolean, drafts: number,
 *   version: number, savedBy?: string | null, savedAt?: string | null}} Facts
 * @typedef {{name: StatusName, label: string, detail: Partial<Facts>}} Status
 * @typedef {{
 *   loaded: boolean, version: number, base: Json, savedBy?: string | null, savedAt?: string | null,
 *   pending: Snapshot | null, staged: {content: Json} | null, sending: Snapshot | null, lost: Snapshot[],
 *   conflict: Stored | null, error: Failure | null, backupFailed: boolean, drafts: Draft[], malformed: string[],
 *   generation: number, reads: number, reading: {n: number, why: Why, generation: number} | null, want: Why | null,
 *   writer: boolean | null, since: number, until: number, tries: number, debounce: number}} State
 * @typedef {"refresh" | "discard"} Why
 * @typedef {{status?: number, reason?: string, detail?: string, offline?: boolean, wait?: number}} Problem
 * @typedef {{now: number, jitter?: number} & (
 *   {type: "edit", content: Json, saveId: string} | {type: "stage", content: Json} | {type: "due" | "flush" | "wake"}
 *   | {type: "saved", stored: Stored} | {type: "refused", stored: Stored} | {type: "failed", problem: Problem}
 *   | {type: "refresh", why: Why} | {type: "read", n: number, stored?: Stored}
 *   | {type: "unread", n: number, problem: Problem}
 *   | {type: "drafts", drafts: Draft[], malformed: string[]} | {type: "dismiss", id: string}
 *   | {type: "recover", id: string, saveId: string}
 *   | {type: "rebased", stored: Stored, content: Json, generation: number, saveId: string}
 *   | {type: "writer", on: boolean} | {type: "backup", ok: boolean})} Event_
 * @typedef {{do: "arm", ms: number} | {do: "disarm"} | {do: "list"} | {do: "remove", id: string}
 *   | {do: "send", body: {expected_version: number, save_id: string, content: Json}}
 *   | {do: "read", n: number, known?: number} | {do: "draft", slot: Omit<Slot, "updated"> | null, retire?: string}
 *   | {do: "emit", type: "remote" | "conflict" | "saved", detail: Stored} | {do: "tell", version: number}} Effect
 * @typedef {{put(id: string, slot: Slot): unknown, remove(id: string): unknown,
 *   list(prefix: string): [string, unknown][] | Promise<[string, unknown][]>}} DraftStorage
 * @typedef {{setTimeout(act: () => void, ms: number): any, clearTimeout(timer: any): void, now(): number}} Timers
 * @typedef {{user: string, fetch?: typeof fetch, debounce?: number, storage?: DraftStorage, timers?: Timers,
 *   headers?: Record<string, string> | (() => Record<string, string> | Promise<Record<string, string>>),
 *   merge?: Merge, locks?: LockManager | null, channel?: ((name: string) => BroadcastChannel) | null,
 *   page?: Window | null}} Options
 * @typedef {(base: Json, mine: Json, theirs: Json) => Json} Merge Returns what to save; undefined refuses.
 */
/** @template T @typedef {T extends any ? Omit<T, "now" | "jitter"> : never} Bare */

const LONGEST = 10_000;
const TIMEOUT = 15_000;
const POLL = 30_000;
const HANDOVER = 5_000;
const KEEPALIVE = 60_000;
const MONTH = 30 * 86_400_000;

/** @param {number} [debounce] @returns {State} */
export const unloaded = (debounce = 1500) => ({
  loaded: false, version: 0, base: undefined, pending: null, staged: null, sending: null, lost: [], conflict: null,
  error: null, backupFailed: false, drafts: [], malformed: [], generation: 0, reads: 0, reading: null, want: null,
  writer: true, since: 0, until: 0, tries: 0, debounce,
});

/** What the person sees: the newest of typed, edited and stored. @param {State} s */
export const local = (s) => (s.staged ?? s.pending ?? { content: s.base }).content;

/** Equal as JSON; Postgres keeps no order of keys. @param {Json} a @param {Json} b @returns {boolean} */
const same = (a, b) =>
  a === b ||
  (!!a && !!b && typeof a == "object" && typeof b == "object" && Array.isArray(a) == Array.isArray(b) &&
    Object.keys(a).length == Object.keys(b).length &&
    Object.keys(a).every((key) => Object.hasOwn(b, key) && same(a[key], b[key])));

/** @param {number} [status] */
const isNetwork = (status) => !status || status == 502 || status == 504;

/** Decide what an event changes, and what is to be done about it. @param {State} s @param {Event_} e
 * @returns {[State, Effect[]]} */
export function reduce(s, e) {
  /** @type {Effect[]} */
  const effects = [];
  s = { ...s };
  const unsaved = () => s.pending || s.staged;
  /** @param {string} [retire] */
  const draft = (retire) => {
    const slot = { version: s.version, base: s.base, content: local(s), save_id: s.staged ? undefined : s.pending?.saveId };
    effects.push({ do: "draft", slot: unsaved() ? slot : null, retire });
  };
  /** @param {"remote" | "conflict" | "saved"} type @param {Stored} detail */
  const emit = (type, detail) => effects.push({ do: "emit", type, detail });
  const remote = () => emit("remote", { version: s.version, content: local(s), savedBy: s.savedBy, savedAt: s.savedAt });
  // A wait that the server asked for is not cut short by typing.
  const arm = () => {
    if (s.pending && !s.conflict && s.writer && e.now >= s.until && s.error?.name != "gone")
      effects.push({ do: "arm", ms: Math.max(0, Math.min(s.debounce, (s.since || e.now) + LONGEST - e.now)) });
  };
  // A discard that came to nothing had stopped the timer.
  const resume = () => {
    if (s.error?.retryAt) effects.push({ do: "arm", ms: Math.max(0, s.error.retryAt - e.now) });
    else if (!s.error) arm();
  };
  const send = () => {
    if (!s.loaded || !s.pending || s.conflict || s.sending || !s.writer || e.now < s.until) return;
    s.sending = s.pending;
    s.since = 0;
    s.generation++;
    const { content, saveId } = s.pending;
    effects.push({ do: "disarm" }, { do: "send", body: { expected_version: s.version, save_id: saveId, content } });
  };
  /** @param {Why} why */
  const read = (why) => {
    s.want = null;
    if (why == "discard") effects.push({ do: "disarm" });
    s.reading = { n: ++s.reads, why, generation: s.generation };
    effects.push({ do: "read", n: s.reads, known: s.base === undefined ? undefined : s.version });
  };
  /** @param {Stored} stored */
  const adopt = (stored) => {
    ({ version: s.version, content: s.base, savedBy: s.savedBy, savedAt: s.savedAt } = stored);
    s.lost = [];
    s.tries = s.until = 0;
  };
  /** The server has this snapshot; a newer one stays. @param {Snapshot} sent @param {Stored} stored */
  const acknowledge = (sent, stored) => {
    adopt(stored);
    s.error = null;
    if (s.pending?.saveId == sent.saveId) s.pending = null;
    draft();
    emit("saved", stored);
    effects.push({ do: "tell", version: s.version });
  };
  /** @param {Stored} stored */
  const disagree = (stored) => {
    if (!s.conflict) emit("conflict", stored);
    s.conflict = stored;
    effects.push({ do: "disarm" });
  };
  // Our own write whose answer was lost is no conflict.
  /** @param {Stored} stored */
  const ours = (stored) =>
    [...(s.pending ? [s.pending] : []), ...s.lost].find((sent) => same(sent.content, stored.content));
  const saveEnded = () => {
    const sent = s.sending;
    s.sending = null;
    s.generation++;
    return sent;
  };
  /** @param {boolean} [more] */
  const next = (more) => {
    if (more && s.want != "discard") send();
    if (!s.sending && s.want) read(s.want);
  };
  /** @param {"read" | "save"} of @param {Problem} problem @returns {Failure} */
  const failure = (of, { status, reason, detail, offline, wait }) => {
    const slow = status == 429 || status == 503;
    /** @type {Failure} */
    const error = { of, name: "blocked", status, reason, detail };
    if (status == 404 || status == 410) error.name = "gone";
    else if (slow || isNetwork(status)) {
      error.name = offline ? "offline" : "retrying";
      if (of == "save" || !s.loaded) {
        const ms = (slow && wait) || Math.min(60, 2 ** Math.min(s.tries++, 6)) * (500 + 500 * (e.jitter ?? 1));
        error.retryAt = e.now + ms;
        if (slow) s.until = error.retryAt;
        effects.push({ do: "arm", ms });
      }
    }
    return error;
  };

  switch (e.type) {
    case "edit":
      if (!s.loaded) break;
      s.since ||= e.now;
      s.pending = { content: e.content, saveId: e.saveId };
      s.staged = null;
      s.generation++;
      draft();
      arm();
      break;
    case "stage":
      if (!s.loaded) break;
      s.staged = e.content === undefined ? null : { content: e.content };
      s.generation++;
      draft();
      break;
    case "due":
      if (!s.loaded) read("refresh");
      else send();
      break;
    case "flush":
      send();
      break;
    case "wake":
      if (s.error?.retryAt) send();
      if (s.sending) s.want ??= "refresh";
      else if (!s.reading) read("refresh");
      break;
    case "saved": {
      const sent = saveEnded();
      if (sent) acknowledge(sent, { ...e.stored, content: sent.content });
      next(true);
      break;
    }
    case "refused": {
      const sent = saveEnded();
      if (!sent) break;
      const own = same(sent.content, e.stored.content) ? sent : ours(e.stored);
      if (own) acknowledge(own, e.stored);
      else disagree(e.stored);
      next(!!own);
      break;
    }
    case "failed": {
      const sent = saveEnded();
      if (!sent) break;
      const { status } = e.problem;
      // The oldest and the newest that may have arrived: enough to know our own write again, and bounded.
      if (!status || status >= 500)
        s.lost = [...s.lost.filter((old) => old.saveId != sent.saveId), sent].filter((_, i, all) => !i || i > all.length - 8);
      s.error = failure("save", e.problem);
      if (!s.error.retryAt && s.pending?.saveId != sent.saveId) arm();
      next();
      break;
    }
    case "refresh":
      if (e.why == "refresh" && (s.reading?.why == "discard" || s.want)) break;
      if (s.sending) s.want = e.why;
      else read(e.why);
      break;
    case "read": {
      const { n, why, generation } = s.reading ?? { n: 0, why: "refresh", generation: 0 };
      if (n != e.n) break;
      s.reading = null;
      if (generation != s.generation) {
        if (why == "discard") resume();
        break;
      }
      const stored = e.stored ?? { version: s.version, content: s.base, savedBy: s.savedBy, savedAt: s.savedAt };
      if (s.error?.of == "read") s.error = null;
      if (why == "discard" || !unsaved()) {
        const changed = why == "discard" || !s.loaded || stored.version != s.version;
        adopt(stored);
        s.loaded = true;
        s.pending = s.staged = s.conflict = s.error = null;
        if (why == "discard") draft();
        if (changed) remote();
        effects.push({ do: "list" });
      } else if (stored.version == s.version) {
        s.base ??= stored.content;
      } else {
        const own = s.conflict ? undefined : ours(stored);
        if (own) acknowledge(own, stored);
        else disagree(stored);
        arm();
      }
      break;
    }
    case "unread":
      if (s.reading?.n != e.n) break;
      if (s.reading.why == "discard") resume();
      s.reading = null;
      if (s.error?.of != "save") s.error = failure("read", e.problem);
      break;
    case "drafts":
      s.malformed = e.malformed;
      s.drafts = e.drafts.filter(({ content }) => !same(content, s.base));
      break;
    case "dismiss":
      s.drafts = s.drafts.filter(({ id }) => id != e.id);
      s.malformed = s.malformed.filter((id) => id != e.id);
      effects.push({ do: "remove", id: e.id });
      break;
    case "recover": {
      const found = s.drafts.find(({ id }) => id == e.id);
      if (!found || !s.loaded || unsaved() || s.sending) break;
      const { id, version, content, base, save_id } = found;
      const stored = { version: s.version, content: s.base, savedBy: s.savedBy, savedAt: s.savedAt };
      s.drafts = s.drafts.filter((other) => other.id != id);
      s.pending = { content, saveId: save_id || e.saveId };
      s.generation++;
      if (version != s.version) {
        s.version = version;
        s.base = base;
        disagree(stored);
      }
      draft(id);
      remote();
      arm();
      break;
    }
    case "rebased":
      if (!s.conflict || s.sending || e.generation != s.generation) break;
      adopt(e.stored);
      s.pending = { content: e.content, saveId: e.saveId };
      s.staged = s.conflict = s.error = null;
      s.generation++;
      draft();
      remote();
      send();
      break;
    case "writer": {
      const back = e.on && s.writer === false;
      s.writer = e.on;
      arm();
      if (back && !s.sending) read("refresh");
      break;
    }
    case "backup":
      s.backupFailed = !e.ok;
  }
  return [s, effects];
}

const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit" });

/** @param {State} s @returns {Status} */
export function statusOf(s) {
  const unsaved = !!(s.pending || s.staged);
  /** @type {StatusName} */
  const name = s.conflict ? "conflict" : s.error ? s.error.name : !s.loaded ? "unloaded"
    : s.writer === false ? "readonly_tab" : s.sending ? "saving" : unsaved ? "dirty" : "clean";
  const { savedBy, savedAt, version } = s.conflict ?? s;
  const time = s.conflict && Date.parse(savedAt ?? "");
  const at = time ? ` at ${clock.format(time)}` : "";
  const { status, detail } = s.error ?? {};
  const label = {
    unloaded: "Loading…",
    clean: "All changes saved",
    dirty: "Editing…",
    saving: "Saving…",
    offline: "Offline. Your text is kept on this device",
    retrying: "Cannot reach the server. Your text is kept",
    conflict: `${savedBy || "Somebody"} saved a newer version${at}`,
    readonly_tab: "Open in another tab",
    blocked: status == 401 ? "Signed out. Your text is kept" : status == 413 ? "Too large" : `Not accepted: ${detail || status}`,
    gone: "This document was deleted. Copy your text",
  }[name];
  return {
    name,
    label: s.backupFailed && unsaved ? `${label}. This device keeps no copy` : label,
    detail: { ...s.error, unsaved, saving: !!s.sending, conflict: !!s.conflict, backupFailed: s.backupFailed,
      drafts: s.drafts.length, version, savedBy, savedAt },
  };
}

/** `crypto.randomUUID` is missing outside secure contexts. */
const uuid = () =>
  crypto.randomUUID?.() ??
  "10000000-1000-4000-8000-100000000000".replace(/[018]/g, (c) =>
    (+c ^ (crypto.getRandomValues(new Uint8Array(1))[0] & (15 >> (+c / 4)))).toString(16));

/** @param {string[]} parts */
const slotId = (...parts) => ["durable", ...parts].map(encodeURIComponent).join("/");

/** @type {Promise<IDBDatabase | null> | null} */
let opened = null;
const database = () =>
  (opened ??= new Promise((resolve) => {
    const request = indexedDB.open("durable", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("drafts");
    request.onsuccess = () => {
      request.result.onclose = request.result.onversionchange = () => {
        request.result.close();
        opened = null;
      };
      resolve(request.result);
    };
    request.onerror = () => resolve(null);
  }));
/** @template T @param {IDBDatabase} db @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => IDBRequest<T>} act
 * @returns {Promise<T>} */
const transact = (db, mode, act) =>
  new Promise((resolve, reject) => {
    const transaction = db.transaction("drafts", mode, { durability: "strict" });
    const request = act(transaction.objectStore("drafts"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
// Without IndexedDB nothing is awaited, so that the slot is there when `edit` returns.
/** @type {DraftStorage} */
const browserStorage = {
  async put(id, slot) {
    const db = globalThis.indexedDB && (await database());
    if (db) await transact(db, "readwrite", (store) => store.put(slot, id));
    else localStorage.setItem(id, JSON.stringify(slot));
  },
  async remove(id) {
    const db = globalThis.indexedDB && (await database());
    if (db) await transact(db, "readwrite", (store) => store.delete(id));
    else localStorage.removeItem(id);
  },
  async list(prefix) {
    const db = globalThis.indexedDB && (await database());
    if (db) {
      const range = IDBKeyRange.bound(prefix, prefix + "\uffff");
      const ids = await transact(db, "readonly", (store) => store.getAllKeys(range));
      return Promise.all(ids.map(async (id) => /** @type {[string, unknown]} */ ([
        String(id), await transact(db, "readonly", (store) => store.get(id))])));
    }
    return Object.entries({ ...localStorage }).filter(([id]) => id.startsWith(prefix)).map(([id, text]) => {
      try {
        return [id, JSON.parse(text)];
      } catch {
        return [id, null];
      }
    });
  },
};

/** A frozen copy, so that nobody changes what a save or a merge is made from. @param {string} text */
const parse = (text) => JSON.parse(text, (_, value) => Object.freeze(value));
/** @param {Json} value */
const copy = (value) => {
  const text = JSON.stringify(value);
  return text === undefined ? undefined : parse(text);
};

/** @param {any} slot */
const isSlot = (slot) => Number.isSafeInteger(slot?.version) && slot.version >= 0 && slot.content !== undefined &&
  typeof slot.updated == "number";

/** @param {any} data @returns {Stored | undefined} */
const storedOf = (data) => {
  const { version, content, saved_by, saved_at } = data ?? {};
  return Number.isSafeInteger(version) ? { version, content, savedBy: saved_by, savedAt: saved_at } : undefined;
};

/** @param {Response | undefined} response @param {any} data @returns {Problem} */
const problemOf = (response, data) => {
  if (!response) return { offline: globalThis.navigator?.onLine === false };
  const after = response.headers.get("Retry-After");
  const seconds = after && (isNaN(+after) ? (Date.parse(after) - Date.now()) / 1000 : +after);
  return {
    // A redirect is a sign-in page; an answer that is none came from something in between.
    status: response.type == "opaqueredirect" ? 401 : response.ok ? undefined : response.status,
    reason: data?.reason, detail: data?.detail ?? data?.title,
    wait: seconds ? 1000 * Math.min(3600, Math.max(1, seconds)) : undefined,
  };
};

/** @param {Draft | string} draft */
const idOf = (draft) => (typeof draft == "string" ? draft : draft.id);

/** Bytes of the saves on their way that a closing page may leave behind; browsers allow 64 KiB in all. */
let kept = 0;

/** @type {Map<string, DocumentSession>} */
const sessions = new Map();

/**
 * The session of a document: one per user and address in a page, however often it is opened. It loads at once; until
 * then edits are ignored. `user` keeps the drafts of people who share a browser apart.
 *
 * @param {string} url The document's own address, e.g. "/briefs/42".
 * @param {Options} options `locks`, `channel` and `page` are the browser's own, and null where a test does without.
 */
export function openDocument(url, options) {
  if (!options?.user) throw new TypeError("openDocument needs a user: drafts are kept apart by it");
  const href = new URL(url, globalThis.location?.href ?? "http://localhost/").href;
  const id = slotId(options.user, href);
  const found = sessions.get(id);
  if (found) found._opened++;
  const session = found ?? new DocumentSession(href, id, options);
  sessions.set(id, session);
  return session;
}

/** For signing out: end the user's sessions in this page and remove every draft of theirs from this browser.
 * What is not saved is gone; `flush` first. @param {string} user @param {DraftStorage} [storage] */
export async function clearDrafts(user, storage = browserStorage) {
  const prefix = `${slotId(user)}/`;
  for (const [id, session] of sessions) if (id.startsWith(prefix)) await session._end();
  for (const [id] of await storage.list(prefix)) await storage.remove(id);
}

/**
 * Tells what happens by events: "status"; "remote" (put `content` into the editor: it was loaded, merged, recovered or
 * saved elsewhere); "conflict"; "saved".
 */
export class DocumentSession extends EventTarget {
  /** @internal */ _opened = 1;
  #id;
  #own;
  #options;
  #storage;
  #timers;
  #locks;
  #page;
  #channel;
  /** @type {State} */ #state;
  /** @type {Effect[]} */ #todo = [];
  /** @type {[() => boolean, () => void][]} */ #waiting = [];
  /** @type {Omit<Slot, "updated"> | null | undefined} */ #slot;
  /** @type {string[]} */ #retired = [];
  /** @type {Promise<void> | null} */ #writing = null;
  /** @type {any} */ #timer;
  /** @type {any} */ #poll;
  #ended = new AbortController();
  #running = false;
  #queued = false;
  #shown = "";
  #release = () => {};
  #released = () => {};

  /** @internal @param {string} url @param {string} id @param {Options} options */
  constructor(url, id, options) {
    super();
    const world = /** @type {any} */ (globalThis);
    const { page = world.window, locks = world.navigator?.locks, channel } = options;
    this.url = url;
    this.#id = id;
    this.#own = `${id}/${uuid()}`;
    this.#options = options;
    this.#storage = options.storage ?? browserStorage;
    this.#timers = options.timers ?? {
      setTimeout: (act, ms) => setTimeout(act, ms), clearTimeout: (timer) => clearTimeout(timer), now: () => Date.now() };
    this.#locks = locks;
    this.#page = page;
    this.#state = { ...unloaded(options.debounce), writer: locks ? null : true };
    const { signal } = this.#ended;
    const hide = () => void this.flush();
    const wake = () => this.#dispatch({ type: "wake" });
    page?.addEventListener("pagehide", hide, { signal });
    page?.document.addEventListener("visibilitychange", () => (page.document.hidden ? hide() : wake()), { signal });
    page?.addEventListener("focus", wake, { signal });
    page?.addEventListener("online", wake, { signal });
    page?.addEventListener("beforeunload", (/** @type {Event} */ event) => {
      const { unsaved, conflict, backupFailed } = this.status.detail;
      if (unsaved && (conflict || backupFailed || this.status.name == "blocked")) event.preventDefault();
    }, { signal });
      const broadcast = channel ?? (channel === undefined && page && world.BroadcastChannel ? (name) => new BroadcastChannel(name) : null);
    this.#channel = broadcast?.(id);
    if (this.#channel) this.#channel.onmessage = (/** @type {MessageEvent} */ { data }) => this.#hear(data);
    if (locks) this.#hold({ ifAvailable: true });
    this.#dispatch({ type: "refresh", why: "refresh" });
    this.#tick();
  }

  /** Frozen: change a copy, and hand it to `edit`. */
  get content() { return local(this.#state); }
  /** The stored version that `content` is made from. */
  get version() { return this.#state.version; }
  get status() { return statusOf(this.#state); }
  /** Other sessions' unsaved work, newest first: offered, never applied. */
  get drafts() { return this.#state.drafts; }
  /** Ids of draft slots that nobody can read; they can be dismissed. */
  get malformed() { return this.#state.malformed; }
  /** While in conflict: what the server holds. */
  get theirs() { return this.#state.conflict; }
  get canRebase() { return !!(this.#state.conflict && this.#options.merge && this.#state.base !== undefined); }

  /** Save this content soon; a copy is kept on this device at once. Ignored before the first load: false.
   * @param {Json} content @throws {TypeError} no JSON value, or the session has ended */
  edit(content) {
    if (JSON.stringify(content) === undefined) throw new TypeError("content is no JSON value");
    return this.#alter({ type: "edit", content: copy(content), saveId: uuid() });
  }

  /** Keep uncommitted typing on this device, and never send it; without content, drop it. @param {Json} [content] */
  stage(content) {
    return this.#alter({ type: "stage", content: copy(content) });
  }

  /** Save now. True once all that was edited is on the server. */
  async flush() {
    this.#dispatch({ type: "flush" });
    await this.#until((s) => !s.sending);
    return this.#state.loaded && !this.#state.pending;
  }

  /** Look for a newer version. It is taken over where nothing is unsaved, and is a conflict else. */
  reload() {
    return this.#refresh("refresh");
  }

  /** The user's own word: drop what is unsaved for what the server holds. Where that cannot be fetched, or an edit comes
   * in between, all is kept: false. */
  discard() {
    return this.#refresh("discard");
  }

  /** The user's own word in a conflict: save the merger of both sides upon the server's version. An edit during the
   * fetch takes part. False, and nothing changed, without conflict, merge or confirmed base, and where it refuses.
   * @param {Merge | ((base: Json, mine: Json, theirs: Json) => Promise<Json>)} [merge] */
  async rebase(merge = this.#options.merge) {
    if (!this.#state.conflict || !merge || this.#state.base === undefined) return false;
    try {
      const { response, data } = await this.#request("GET", "");
      const stored = storedOf(data);
      const { generation, base, conflict } = this.#state;
      if (!response?.ok || !stored || !conflict) return false;
      const content = copy(await merge(base, this.content, stored.content));
      if (content !== undefined) this.#dispatch({ type: "rebased", stored, content, generation, saveId: uuid() });
    } catch {
      // The user still sees the conflict, and may ask again.
    }
    await this.#until((s) => !s.sending);
    return !this.#state.conflict;
  }

  /** Continue another session's unsaved work, on the version it was made from: a conflict if that is no longer the
   * newest. Only while clean, else false. @param {Draft | string} draft */
  recover(draft) {
    const { generation } = this.#state;
    this.#dispatch({ type: "recover", id: idOf(draft), saveId: uuid() });
    return this.#state.generation != generation;
  }

  /** Remove another session's draft, never this one's own. @param {Draft | string} draft */
  dismiss(draft) {
    const id = idOf(draft);
    if (id != this.#own && id.startsWith(`${this.#id}/`)) this.#dispatch({ type: "dismiss", id });
  }

  /** Write in this tab: the other one saves first, then this takes its place. */
  async takeOver() {
    if (this.#state.writer || !this.#locks) return;
    const timer = this.#timers.setTimeout(() => this.#released(), HANDOVER);
    await new Promise((resolve) => {
      this.#released = () => resolve(undefined);
      if (this.#channel) this.#channel.postMessage({ handover: true });
      else resolve(undefined);
    });
    this.#timers.clearTimeout(timer);
    // Letting go may have given it to us, who waited for it.
    if (!this.#state.writer) this.#hold({ steal: true });
    await this.#until((s) => !!s.writer && !s.reading);
  }

  /** Save and let go; with unsaved work the session lives on, and opening the document again finds it. */
  async close() {
    this._opened--;
    const saved = await this.flush();
    this.#settle();
    await this.#writing;
    return saved;
  }

  /** @internal */
  async _end() {
    if (sessions.get(this.#id) == this) sessions.delete(this.#id);
    this.#ended.abort();
    this.#timers.clearTimeout(this.#timer);
    this.#timers.clearTimeout(this.#poll);
    this.#release();
    this.#channel?.close();
    this.#tell();
    await this.#writing;
  }

  /** @param {Bare<Event_>} event */
  #alter(event) {
    if (this.#ended.signal.aborted) throw new TypeError("this session has ended: open the document again");
    this.#dispatch(event);
    return this.#state.loaded;
  }

  /** @param {Why} why */
  async #refresh(why) {
    this.#dispatch({ type: "refresh", why });
    await this.#until((s) => !s.reading && !s.want);
    const { loaded, error, pending, staged, conflict } = this.#state;
    return loaded && !error && (why == "refresh" || !(pending || staged || conflict));
  }

  /** @param {Bare<Event_>} event */
  #dispatch(event) {
    if (this.#ended.signal.aborted) return;
    const [state, effects] = reduce(this.#state, { now: this.#timers.now(), jitter: Math.random(), ...event });
    this.#state = state;
    this.#todo.push(...effects);
    // A listener may edit: what that asks for comes after what is still to do.
    if (this.#running) return;
    this.#running = true;
    for (let effect; (effect = this.#todo.shift()); ) this.#act(effect);
    this.#running = false;
    const { status } = this;
    const shown = JSON.stringify(status);
    if (shown != this.#shown) {
      this.#shown = shown;
      this.#emit("status", status);
    }
    this.#tell();
    if (this._opened < 1) this.#settle();
  }

  /** @param {(s: State) => boolean} test */
  #until(test) {
    return new Promise((resolve) => {
      const now = () => this.#ended.signal.aborted || test(this.#state);
      if (now()) resolve(undefined);
      else this.#waiting.push([now, () => resolve(undefined)]);
    });
  }

  #tell() {
    const ready = this.#waiting.filter(([test]) => test());
    this.#waiting = this.#waiting.filter((waiting) => !ready.includes(waiting));
    for (const [, resolve] of ready) resolve();
  }

  /** @param {string} type @param {unknown} detail */
  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  /** @param {Effect} effect */
  #act(effect) {
    const timers = this.#timers;
    switch (effect.do) {
      case "arm":
      case "disarm":
        timers.clearTimeout(this.#timer);
        if (effect.do == "arm") this.#timer = timers.setTimeout(() => this.#dispatch({ type: "due" }), effect.ms);
        break;
      case "send":
        this.#send(JSON.stringify(effect.body));
        break;
      case "read":
        this.#read(effect.n, effect.known);
        break;
      case "draft":
        this.#slot = effect.slot;
        if (effect.retire) this.#retired.push(effect.retire);
        this.#writing ??= this.#write();
        break;
      case "remove":
        this.#remove(effect.id);
        break;
      case "list":
        this.#list();
        break;
      case "tell":
        this.#channel?.postMessage({ saved: effect.version });
        break;
      case "emit":
        this.#emit(effect.type, effect.detail);
    }
  }

  /** @param {string} body */
  async #send(body) {
    const bytes = new TextEncoder().encode(body).length;
    const keepalive = kept + bytes <= KEEPALIVE;
    if (keepalive) kept += bytes;
    const { response, data } = await this.#request("POST", "/versions", { body, keepalive });
    if (keepalive) kept -= bytes;
    const { version, current_version, saved_at: savedAt, saved_by: savedBy, current: content } = data ?? {};
    if (response?.ok && Number.isSafeInteger(version))
      this.#dispatch({ type: "saved", stored: { version, content, savedAt } });
    else if ([409, 412].includes(response?.status ?? 0) && Number.isSafeInteger(current_version))
      this.#dispatch({ type: "refused", stored: { version: current_version, content, savedBy, savedAt } });
    else this.#dispatch({ type: "failed", problem: problemOf(response, data) });
  }

  /** @param {number} n @param {number} [known] */
  async #read(n, known) {
    const { response, data } = await this.#request("GET", "", {}, known === undefined ? {} : { "If-None-Match": `"${known}"` });
    const stored = storedOf(data);
    if (response?.status == 304) this.#dispatch({ type: "read", n });
    else if (response?.ok && stored) this.#dispatch({ type: "read", n, stored });
    else this.#dispatch({ type: "unread", n, problem: problemOf(response, data) });
  }

  /** No response: it failed, or took too long.
   * @param {string} method @param {string} path @param {RequestInit} [init] @param {Record<string, string>} [known]
   * @returns {Promise<{response?: Response, data?: any}>} */
  async #request(method, path, init, known) {
    const abort = new AbortController();
    /** @type {any} */
    let timer;
    const late = new Promise((resolve) => {
      timer = this.#timers.setTimeout(() => {
        abort.abort();
        resolve({});
      }, TIMEOUT);
    });
    const answer = async () => {
      const { headers } = this.#options;
      const url = new URL(this.url);
      url.pathname += path;
      const response = await (this.#options.fetch ?? fetch)(url.href, {
        ...init, method, cache: "no-store", redirect: "manual", signal: abort.signal,
        headers: { ...(init?.body ? { "Content-Type": "application/json" } : {}), ...known,
          ...(typeof headers == "function" ? await headers() : headers) },
      });
      const text = await response.text();
      let data;
      try {
        data = parse(text);
      } catch {
        // No JSON: judged by its status.
      }
      return { response, data };
    };
    try {
      return await Promise.race([answer(), late]);
    } catch {
      return {};
    } finally {
      this.#timers.clearTimeout(timer);
    }
  }

  async #write() {
    while (this.#slot !== undefined) {
      const slot = this.#slot;
      this.#slot = undefined;
      let ok = true;
      try {
        await (slot ? this.#storage.put(this.#own, { ...slot, updated: this.#timers.now() }) : this.#storage.remove(this.#own));
        // What was taken over goes once it lies in our own slot.
        for (let id; slot && (id = this.#retired.shift()); ) await this.#storage.remove(id);
      } catch {
        ok = false;
      }
      this.#dispatch({ type: "backup", ok });
    }
    this.#writing = null;
    if (this._opened < 1) this.#settle();
  }

  /** @param {string} id */
  async #remove(id) {
    try {
      await this.#storage.remove(id);
    } catch {
      this.#dispatch({ type: "backup", ok: false });
    }
  }

  async #list() {
    try {
      const drafts = [];
      const malformed = [];
      for (const [id, slot] of await this.#storage.list("durable/")) {
        if (id == this.#own) continue;
        const good = isSlot(slot);
        const draft = /** @type {Draft} */ (good ? { ...copy(slot), id } : {});
        if (good && draft.updated < this.#timers.now() - MONTH) this.#remove(id);
        else if (id.startsWith(`${this.#id}/`)) good ? drafts.push(draft) : malformed.push(id);
      }
      drafts.sort((a, b) => b.updated - a.updated);
      this.#dispatch({ type: "drafts", drafts, malformed });
    } catch {
      this.#dispatch({ type: "backup", ok: false });
    }
  }

  /** Ask for the lock of this document, and for as long as it is ours be the tab that writes.
   * @param {LockOptions} options */
  async #hold(options) {
    const waits = !options.steal && !options.ifAvailable;
    if (waits && this.#queued) return;
    this.#queued ||= waits;
    const locks = /** @type {LockManager} */ (this.#locks);
    let usable = true;
    /** @type {(() => void) | undefined} */
    let mine;
    try {
      await locks.request(this.#id, options, (lock) => {
        if (waits) this.#queued = false;
        if (!lock || this.#ended.signal.aborted) return;
        this.#dispatch({ type: "writer", on: true });
        return new Promise((resolve) => (this.#release = mine = () => resolve(undefined)));
      });
    } catch (error) {
      // AbortError: taken by another tab. Anything else: no locks here, and versions alone keep it safe.
      usable = /** @type {Error} */ (error).name == "AbortError";
    }
    // A lock that this tab took from itself is still its own.
    if (!mine || mine == this.#release) this.#dispatch({ type: "writer", on: !usable });
    if (usable && !this.#ended.signal.aborted) this.#hold({});
  }

  /** @param {any} message */
  async #hear({ saved, handover, released }) {
    if (released) this.#released();
    else if (handover && this.#state.writer) {
      await this.flush();
      this.#release();
      this.#channel?.postMessage({ released: true });
    } else if (saved !== undefined && saved != this.#state.version) this.#dispatch({ type: "refresh", why: "refresh" });
  }

  #tick() {
    this.#poll = this.#timers.setTimeout(() => {
      const { error } = this.#state;
      const hopeful = !error || error.name == "retrying" || error.name == "offline";
      if (hopeful && !this.#page?.document.hidden) this.#dispatch({ type: "refresh", why: "refresh" });
      this.#tick();
    }, POLL);
  }

  #settle() {
    const { pending, staged, sending, conflict } = this.#state;
    if (this._opened < 1 && !pending && !staged && !sending && !conflict && !this.#writing) this._end();
  }
}
