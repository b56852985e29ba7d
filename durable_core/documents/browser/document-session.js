/**
 * One versioned document in one page: edits wait in a queue, each save names the version it was made from, and nothing
 * typed is lost. A pure reducer decides, a session acts. What each method promises: document-session.types.d.ts.
 *
 * @import {Answer, Draft, DraftStorage, Effect, Failure, Happening, Json, Merge, Moment, Options, Session, Slot,
 *   Snapshot, State, Status, StatusName, Stored, Why} from "./document-session.types.js"
 */

const LONGEST = 10_000;
const TIMEOUT = 15_000;
const POLL = 30_000;
const HANDOVER = 5_000;
const KEEPALIVE = 60_000;
const MONTH = 30 * 86_400_000;

/** @type {State} */
export const unloaded = {
  version: 0, base: undefined, lost: [], drafts: [], malformed: [], generation: 0, reads: 0, since: 0, until: 0, tries: 0,
  writer: true, debounce: 1500,
};

/** What the person sees. @param {State} s */
export const local = (s) => (s.staged ?? s.pending ?? { content: s.base }).content;

/** Keys in order, for Postgres keeps none. @param {Json} value */
const canonical = (value) =>
  JSON.stringify(value, (_, v) => v && typeof v == "object" && !Array.isArray(v)
    ? Object.fromEntries(Object.keys(v).sort().map((key) => [key, v[key]])) : v);
/** @param {Json} a @param {Json} b */
const same = (a, b) => canonical(a) == canonical(b);

/** @param {State} s @param {Moment} e @returns {[State, Effect[]]} */
export function reduce(s, e) {
  /** @type {Effect[]} */
  const effects = [];
  s = { ...s };
  const unsaved = () => s.pending || s.staged;
  const stored = () => ({ version: s.version, content: s.base, savedBy: s.savedBy, savedAt: s.savedAt });
  /** @param {string} [retire] */
  const draft = (retire) => {
    const { version, base, pending, staged } = s;
    const slot = unsaved() && { version, base, content: local(s), save_id: staged ? undefined : pending?.saveId };
    effects.push({ do: "draft", slot, retire });
  };
  /** @param {"remote" | "conflict" | "saved"} type @param {Stored} detail */
  const emit = (type, detail) => effects.push({ do: "emit", type, detail });
  const remote = () => emit("remote", { ...stored(), content: local(s) });
  /** @param {number} [at] */
  const arm = (at) => effects.push({ do: "arm", ms: at && Math.max(0, at - e.now) });
  // A wait that the server asked for is not cut short by typing.
  const schedule = () => {
    if (s.pending && !s.conflict && s.writer && e.now >= s.until && s.error?.name != "gone")
      arm(Math.min(e.now + s.debounce, (s.since || e.now) + LONGEST));
  };
  const send = () => {
    if (!s.pending || s.conflict || s.sending || !s.writer || e.now < s.until) return;
    s.sending = s.pending;
    s.since = 0;
    s.generation++;
    arm();
    const { content, saveId } = s.pending;
    effects.push({ do: "send", body: JSON.stringify({ expected_version: s.version, save_id: saveId, content }) });
  };
  /** @param {Why} why */
  const read = (why) => {
    s.want = null;
    if (why == "discard") arm();
    s.reading = { n: ++s.reads, why, generation: s.generation };
    effects.push({ do: "read", n: s.reads, known: s.base === undefined ? undefined : s.version });
  };
  /** @param {Stored} from */
  const adopt = (from) => {
    ({ version: s.version, content: s.base, savedBy: s.savedBy, savedAt: s.savedAt } = from);
    s.lost = [];
    s.tries = s.until = 0;
    s.error = null;
  };
  /** A newer snapshot stays. @param {Snapshot} sent @param {Stored} from */
  const acknowledge = (sent, from) => {
    adopt(from);
    if (s.pending?.saveId == sent.saveId) s.pending = null;
    draft();
    emit("saved", from);
  };
  /** Our own write whose answer was lost is no conflict. @param {Stored} from @param {Snapshot | null} [sent] */
  const differ = (from, sent = s.pending) => {
    const own = s.conflict ? null : [sent, ...s.lost].find((one) => one && same(one.content, from.content));
    if (own) return acknowledge(own, from);
    if (!s.conflict) emit("conflict", from);
    s.conflict = from;
    arm();
  };
  /** @param {string} saveId @param {Json} content */
  const pend = (saveId, content) => {
    s.pending = { saveId, content };
    s.staged = null;
    s.generation++;
  };
  /** @param {"read" | "save"} of @param {Answer} answer */
  const fail = (of, { status, data, offline, wait }) => {
    const slow = status == 429 || status == 503;
    // No answer, or one of something in between.
    const lost = status < 400 || status == 502 || status == 504;
    /** @type {Failure} */
    const error = { of, name: "blocked", status, reason: data?.reason, detail: data?.detail ?? data?.title };
    s.error = error;
    if (status == 404 || status == 410) error.name = "gone";
    if (!slow && !lost) return;
    error.name = offline ? "offline" : "retrying";
    if (of == "read" && s.loaded) return;
    const ms = wait || 2 ** Math.min(s.tries++, 6) * (500 + 500 * (e.jitter ?? 1));
    error.retryAt = e.now + ms;
    if (slow) s.until = error.retryAt;
    arm(error.retryAt);
  };

  switch (e.type) {
    case "edit":
      if (!s.loaded) break;
      s.since ||= e.now;
      pend(e.saveId, e.content);
      draft();
      schedule();
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
    // falls through
    case "refresh":
      if (s.reading?.why == "discard" || s.want) break;
    // falls through
    case "discard":
      if (s.sending) s.want = e.type == "discard" ? "discard" : "refresh";
      else read(e.type == "discard" ? "discard" : "refresh");
      break;
    case "sent": {
      const { status, data } = e.answer;
      const sent = s.sending;
      if (!sent) break;
      s.sending = null;
      s.generation++;
      if (status < 300 && isVersion(data?.version)) {
        acknowledge(sent, { version: data.version, content: sent.content, savedAt: data.saved_at });
      } else if ((status == 409 || status == 412) && isVersion(data?.current_version)) {
        differ({ ...storedOf(data), version: data.current_version, content: data.current }, sent);
      } else {
        // The oldest and the newest that may have arrived: bounded, and enough to know our own write again.
        if (status < 400 || status > 499)
          s.lost = [...s.lost.filter((one) => one.saveId != sent.saveId), sent].filter((_, i, all) => !i || i > all.length - 8);
        fail("save", e.answer);
        if (!s.error?.retryAt && s.pending?.saveId != sent.saveId) schedule();
      }
      if (!s.error && s.want != "discard") send();
      if (!s.sending && s.want) read(s.want);
      break;
    }
    case "read": {
      const { status, data } = e.answer;
      const reading = s.reading;
      if (reading?.n != e.n) break;
      s.reading = null;
      const discard = reading.why == "discard";
      const from = status == 304 ? stored() : storedOf(data);
      const good = status == 304 || (status < 300 && isVersion(from.version));
      const raced = reading.generation != s.generation;
      if (discard && (raced || !good)) {
        // It comes to nothing, and had stopped the timer.
        if (s.error?.retryAt) arm(s.error.retryAt);
        else if (!s.error) schedule();
      }
      if (!good) {
        if (s.error?.of != "save") fail("read", e.answer);
      } else if (!raced) {
        if (s.error?.of == "read") s.error = null;
        if (discard || !unsaved()) {
          const known = s.loaded && !discard && from.version == s.version;
          adopt(from);
          s.loaded = true;
          s.pending = s.staged = s.conflict = null;
          if (discard) draft();
          if (!known) remote();
          effects.push({ do: "list" });
        } else if (from.version == s.version) s.base ??= from.content;
        else {
          differ(from);
          schedule();
        }
      }
      break;
    }
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
      if (!found || unsaved() || s.sending) break;
      s.drafts = s.drafts.filter((one) => one != found);
      const { version, content, base, save_id } = found;
      if (version != s.version) {
        s.conflict = stored();
        emit("conflict", s.conflict);
        Object.assign(s, { version, base });
      }
      pend(save_id || e.saveId, content);
      draft(e.id);
      remote();
      schedule();
      break;
    }
    case "rebased":
      if (!s.conflict || s.sending || e.generation != s.generation) break;
      adopt(e.stored);
      s.conflict = null;
      pend(e.saveId, e.content);
      draft();
      remote();
      send();
      break;
    case "writer":
      if (e.on && s.writer === false && !s.sending) read("refresh");
      s.writer = e.on;
      schedule();
      break;
    case "backup":
      s.backupFailed = !e.ok;
  }
  return [s, effects];
}

/** @param {State} s @returns {Status} */
export function statusOf(s) {
  const unsaved = !!(s.pending || s.staged);
  /** @type {StatusName} */
  const name = s.conflict ? "conflict" : s.error ? s.error.name : !s.loaded ? "unloaded"
    : s.writer === false ? "readonly_tab" : s.sending ? "saving" : unsaved ? "dirty" : "clean";
  const { savedBy, savedAt, version } = s.conflict ?? s;
  const { status, detail } = s.error ?? {};
  const label = {
    unloaded: "Loading…",
    clean: "All changes saved",
    dirty: "Editing…",
    saving: "Saving…",
    offline: "Offline. Your text is kept on this device",
    retrying: "Cannot reach the server. Your text is kept",
    conflict: `${savedBy || "Somebody"} saved a newer version`,
    readonly_tab: "Open in another tab",
    blocked: status == 401 ? "Signed out. Your text is kept" : status == 413 ? "Too large" : `Not accepted: ${detail || status}`,
    gone: "This document was deleted. Copy your text",
  }[name] + (s.conflict && savedAt ? ` at ${new Date(savedAt).toLocaleTimeString([], { timeStyle: "short" })}` : "");
  return {
    name,
    label: s.backupFailed && unsaved ? `${label}. This device keeps no copy` : label,
    detail: { ...s.error, unsaved, saving: !!s.sending, conflict: !!s.conflict, backupFailed: !!s.backupFailed,
      drafts: s.drafts.length, version, savedBy, savedAt },
  };
}

/** @param {unknown} value */
const isVersion = (value) => Number.isSafeInteger(value) && Number(value) >= 0;

/** @param {any} data @returns {Stored} */
const storedOf = (data) => ({ version: data?.version, content: data?.content, savedBy: data?.saved_by, savedAt: data?.saved_at });

/** Frozen, so that nobody changes what a save or a merge is made from. @param {string} text */
const parse = (text) => JSON.parse(text, (_, value) => Object.freeze(value));

/** @param {Json} value */
const copy = (value) => {
  const text = JSON.stringify(value);
  if (text === undefined) throw new TypeError("no JSON value");
  return parse(text);
};

/** As `crypto.randomUUID`, which insecure contexts lack. */
const uuid = () => "10000000-1000-4000-8000-100000000000".replace(/[018]/g, (c) =>
  (+c ^ (crypto.getRandomValues(new Uint8Array(1))[0] & (15 >> (+c / 4)))).toString(16));

/** @param {string[]} parts */
const slotId = (...parts) => ["durable", ...parts].map(encodeURIComponent).join("/");

/** @type {Promise<IDBDatabase | null> | null} */
let opened = null;
const database = () =>
  (opened ??= new Promise((resolve) => {
    const request = indexedDB.open("durable", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("drafts");
    request.onerror = () => resolve(null);
    request.onsuccess = () => {
      const db = request.result;
      db.onclose = db.onversionchange = () => {
        db.close();
        opened = null;
      };
      resolve(db);
    };
  }));

/** In IndexedDB; without it nothing is awaited, so that a slot is there when `edit` returns.
 * @param {(store: IDBObjectStore) => any} act @param {() => any} otherwise */
const inStore = async (act, otherwise) => {
  const db = globalThis.indexedDB && (await database());
  if (!db) return otherwise();
  return new Promise((resolve, reject) => {
    const transaction = db.transaction("drafts", "readwrite", { durability: "strict" });
    const result = act(transaction.objectStore("drafts"));
    transaction.oncomplete = () => resolve(result);
    transaction.onabort = () => reject(transaction.error);
  });
};

/** @type {DraftStorage} */
const browserStorage = {
  put: (id, slot) => inStore((store) => store.put(slot, id), () => localStorage.setItem(id, JSON.stringify(slot))),
  remove: (id) => inStore((store) => store.delete(id), () => localStorage.removeItem(id)),
  list: async (prefix) => {
    /** @type {[string, unknown][]} */
    const rows = [];
    await inStore(
      (store) => {
        const cursor = store.openCursor();
        cursor.onsuccess = () => {
          if (cursor.result && rows.push([`${cursor.result.key}`, cursor.result.value])) cursor.result.continue();
        };
      },
      () => Object.entries(localStorage).forEach(([id, text]) => {
        try {
          rows.push([id, JSON.parse(text)]);
        } catch {
          rows.push([id, null]);
        }
      }),
    );
    return rows.filter(([id]) => id.startsWith(prefix));
  },
};

/** Bytes on their way that a closing page may leave behind; browsers allow 64 KiB in all. */
let kept = 0;

/** @type {Map<string, DocumentSession>} */
const sessions = new Map();

/** One session per user and address in a page, however often it is opened.
 * @param {string} url @param {Options} options @returns {Session} */
export function openDocument(url, options) {
  if (!options?.user) throw new TypeError("openDocument needs a user: drafts are kept apart by it");
  const href = new URL(url, globalThis.location?.href).href;
  const id = slotId(options.user, href);
  const found = sessions.get(id);
  if (found) found._opened++;
  const session = found ?? new DocumentSession(href, id, options);
  sessions.set(id, session);
  return session;
}

/** For signing out: end the user's sessions in this page and remove all their drafts from this browser.
 * What is not saved is gone: `flush` first. @param {string} user @param {DraftStorage} [storage] */
export async function clearDrafts(user, storage = browserStorage) {
  const prefix = `${slotId(user)}/`;
  for (const [id, session] of sessions) if (id.startsWith(prefix)) await session._end();
  for (const [id] of await storage.list(prefix)) await storage.remove(id);
}

/** @implements {Session} */
export class DocumentSession extends EventTarget {
  /** @internal */ _opened = 1;
  #id;
  #own;
  #options;
  #channel;
  /** @type {State} */ #state;
  /** @type {Effect[]} */ #todo = [];
  /** @type {((_: unknown) => void)[]} */ #waiting = [];
  /** @type {Omit<Slot, "updated"> | null | undefined} */ #slot;
  /** @type {string[]} */ #retired = [];
  /** @type {Promise<void> | null} */ #writing = null;
  /** @type {any} */ #timer;
  /** @type {any} */ #poll;
  #ended = new AbortController();
  #running = false;
  #shown = "";
  #release = () => {};
  #released = () => {};

  /** @internal @param {string} url @param {string} id @param {Options} options */
  constructor(url, id, options) {
    super();
    const { window, navigator, BroadcastChannel } = /** @type {any} */ (globalThis);
    const { page = window, locks = navigator?.locks, storage = browserStorage, debounce = 1500, timers = {
      setTimeout: (act, ms) => setTimeout(act, ms), clearTimeout: (timer) => clearTimeout(timer), now: () => Date.now() } } = options;
    const { channel = page && BroadcastChannel && ((name) => new BroadcastChannel(name)) } = options;
    this.url = url;
    this.#id = id;
    this.#own = `${id}/${uuid()}`;
    this.#options = { ...options, page, locks, storage, timers };
    this.#state = { ...unloaded, debounce, writer: locks ? null : true };
    const { signal } = this.#ended;
    const hide = () => void this.flush();
    const wake = () => this.#dispatch({ type: "wake" });
    page?.addEventListener("pagehide", hide, { signal });
    page?.document.addEventListener("visibilitychange", () => (page.document.hidden ? hide() : wake()), { signal });
    page?.addEventListener("focus", wake, { signal });
    page?.addEventListener("online", wake, { signal });
    page?.addEventListener("beforeunload", (/** @type {Event} */ event) => {
      const { name, detail: { unsaved, backupFailed } } = this.status;
      if (unsaved && (backupFailed || name == "conflict" || name == "blocked")) event.preventDefault();
    }, { signal });
    this.#channel = channel?.(id);
    if (this.#channel) this.#channel.onmessage = (/** @type {MessageEvent} */ { data }) => this.#hear(data);
    if (locks) this.#hold(locks, { ifAvailable: true });
    this.#dispatch({ type: "refresh" });
    this.#tick();
  }

  get content() { return local(this.#state); }
  get version() { return this.#state.version; }
  get status() { return statusOf(this.#state); }
  get drafts() { return this.#state.drafts; }
  get malformed() { return this.#state.malformed; }
  get theirs() { return this.#state.conflict ?? null; }
  get canRebase() { return !!(this.#state.conflict && this.#options.merge && this.#state.base !== undefined); }

  /** @param {Json} content */
  edit(content) {
    return this.#alter({ type: "edit", content: copy(content), saveId: uuid() });
  }

  /** @param {Json} [content] */
  stage(content) {
    return this.#alter({ type: "stage", content: content === undefined ? content : copy(content) });
  }

  async flush() {
    this.#dispatch({ type: "flush" });
    await this.#until((s) => !s.sending);
    return !!this.#state.loaded && !this.#state.pending;
  }

  async reload() {
    await this.#read("refresh");
    return !!this.#state.loaded && !this.#state.error;
  }

  async discard() {
    await this.#read("discard");
    const { loaded, error, pending, staged, conflict } = this.#state;
    return !!loaded && !(error || pending || staged || conflict);
  }

  /** @param {Merge} [merge] */
  async rebase(merge = this.#options.merge) {
    if (!this.#state.conflict || !merge || this.#state.base === undefined) return false;
    try {
      const { status, data } = await this.#request("");
      const stored = storedOf(data);
      const { generation, base } = this.#state;
      if (status > 299 || !isVersion(stored.version)) return false;
      const content = copy(await merge(base, this.content, stored.content));
      this.#dispatch({ type: "rebased", stored, content, generation, saveId: uuid() });
    } catch {
      // The merge failed or refused: the user still sees the conflict.
    }
    await this.#until((s) => !s.sending);
    return !this.#state.conflict;
  }

  /** @param {Draft | string} draft */
  recover(draft) {
    const { generation } = this.#state;
    this.#dispatch({ type: "recover", id: idOf(draft), saveId: uuid() });
    return this.#state.generation != generation;
  }

  /** @param {Draft | string} draft */
  dismiss(draft) {
    const id = idOf(draft);
    if (id != this.#own && id.startsWith(`${this.#id}/`)) this.#dispatch({ type: "dismiss", id });
  }

  async takeOver() {
    const { locks, timers } = this.#options;
    if (!locks || this.#state.writer) return;
    await new Promise((resolve) => {
      this.#released = () => resolve(undefined);
      timers.setTimeout(this.#released, HANDOVER);
      this.#channel?.postMessage({ handover: true });
    });
    // Letting go may have given it to us, who waited for it.
    if (!this.#state.writer) this.#hold(locks, { steal: true });
    await this.#until((s) => s.writer && !s.reading);
  }

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
    this.#options.timers.clearTimeout(this.#timer);
    this.#options.timers.clearTimeout(this.#poll);
    this.#release();
    this.#channel?.close();
    this.#wake();
    await this.#writing;
  }

  /** @param {Happening} event */
  #alter(event) {
    if (this.#ended.signal.aborted) throw new TypeError("this session has ended: open the document again");
    this.#dispatch(event);
    return !!this.#state.loaded;
  }

  /** @param {Why} type */
  async #read(type) {
    this.#dispatch({ type });
    await this.#until((s) => !s.reading && !s.want);
  }

  /** @param {Happening} event */
  #dispatch(event) {
    if (this.#ended.signal.aborted) return;
    const [state, effects] = reduce(this.#state, { ...event, now: this.#options.timers.now(), jitter: Math.random() });
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
    this.#wake();
    this.#settle();
  }

  #wake() {
    for (const wake of this.#waiting.splice(0)) wake(0);
  }

  /** @param {(s: State) => unknown} test */
  async #until(test) {
    while (!this.#ended.signal.aborted && !test(this.#state)) await new Promise((resolve) => this.#waiting.push(resolve));
  }

  /** @param {string} type @param {unknown} detail */
  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  /** @param {Effect} effect */
  #act(effect) {
    const { timers, storage } = this.#options;
    switch (effect.do) {
      case "arm":
        timers.clearTimeout(this.#timer);
        if (effect.ms !== undefined) this.#timer = timers.setTimeout(() => this.#dispatch({ type: "due" }), effect.ms);
        break;
      case "send":
        this.#send(effect.body);
        break;
      case "read": {
        const { n, known } = effect;
        this.#request("", {}, known === undefined ? {} : { "If-None-Match": `"${known}"` })
          .then((answer) => this.#dispatch({ type: "read", n, answer }));
        break;
      }
      case "draft":
        this.#slot = effect.slot ?? null;
        if (effect.retire) this.#retired.push(effect.retire);
        this.#writing ??= this.#write();
        break;
      case "remove":
        this.#attempt(() => storage.remove(effect.id));
        break;
      case "list":
        this.#attempt(() => this.#list());
        break;
      case "emit":
        if (effect.type == "saved") this.#channel?.postMessage({ saved: effect.detail.version });
        this.#emit(effect.type, effect.detail);
    }
  }

  /** @param {string} body */
  async #send(body) {
    const bytes = new TextEncoder().encode(body).length;
    const keepalive = kept + bytes <= KEEPALIVE;
    if (keepalive) kept += bytes;
    const answer = await this.#request("/versions", { method: "POST", body, keepalive }, { "Content-Type": "application/json" });
    if (keepalive) kept -= bytes;
    this.#dispatch({ type: "sent", answer });
  }

  /** Never raises. @param {string} path @param {RequestInit} [init] @param {Record<string, string>} [extra]
   * @returns {Promise<Answer>} */
  async #request(path, init, extra) {
    const { timers, headers, fetch: transport = fetch } = this.#options;
    const abort = new AbortController();
    const none = { status: 0, offline: globalThis.navigator?.onLine === false };
    /** @type {any} */
    let timer;
    const late = new Promise((resolve) => {
      timer = timers.setTimeout(() => {
        resolve(none);
        abort.abort();
      }, TIMEOUT);
    });
    const answer = async () => {
      const url = new URL(this.url);
      url.pathname += path;
      const own = typeof headers == "function" ? await headers() : headers;
      const response = await transport(url.href, {
        ...init, cache: "no-store", redirect: "manual", signal: abort.signal, headers: { ...extra, ...own } });
      // A redirect is a sign-in page.
      const status = response.type == "opaqueredirect" ? 401 : response.status;
      const after = response.headers.get("Retry-After");
      const seconds = after && (+after || (Date.parse(after) - Date.now()) / 1000);
      const wait = seconds ? 1000 * Math.min(3600, Math.max(1, seconds)) : 0;
      const text = await response.text();
      try {
        return { status, wait, data: parse(text) };
      } catch {
        return { status, wait };
      }
    };
    try {
      return await Promise.race([answer(), late]);
    } catch {
      return none;
    } finally {
      timers.clearTimeout(timer);
    }
  }

  /** @param {() => unknown} act */
  async #attempt(act) {
    let ok = true;
    try {
      await act();
    } catch {
      ok = false;
    }
    return ok || this.#dispatch({ type: "backup", ok });
  }

  async #write() {
    const { storage, timers } = this.#options;
    while (this.#slot !== undefined) {
      const slot = this.#slot;
      this.#slot = undefined;
      const ok = await this.#attempt(async () => {
        await (slot ? storage.put(this.#own, { ...slot, updated: timers.now() }) : storage.remove(this.#own));
        // What was taken over goes once it lies in our own slot.
        for (let id; slot && (id = this.#retired.shift()); ) await storage.remove(id);
      });
      if (ok) this.#dispatch({ type: "backup", ok });
    }
    this.#writing = null;
    this.#settle();
  }

  async #list() {
    const { storage, timers } = this.#options;
    const drafts = [];
    const malformed = [];
    for (const [id, value] of await storage.list("durable/")) {
      const slot = /** @type {any} */ (value);
      const good = isVersion(slot?.version) && slot.content !== undefined && typeof slot.updated == "number";
      if (id == this.#own) continue;
      if (good && slot.updated < timers.now() - MONTH) await storage.remove(id);
      else if (id.startsWith(`${this.#id}/`)) good ? drafts.push({ ...copy(slot), id }) : malformed.push(id);
    }
    drafts.sort((a, b) => b.updated - a.updated);
    this.#dispatch({ type: "drafts", drafts, malformed });
  }

  /** While the lock is ours we are the tab that writes. @param {LockManager} locks @param {LockOptions} options */
  async #hold(locks, options) {
    let usable = true;
    /** @type {(() => void) | undefined} */
    let mine;
    try {
      await locks.request(this.#id, options, (lock) => {
        if (!lock || this.#ended.signal.aborted) return;
        this.#dispatch({ type: "writer", on: true });
        return new Promise((resolve) => (this.#release = mine = () => resolve(undefined)));
      });
    } catch (error) {
      // Anything but a steal: there are no locks here, and versions alone keep it safe.
      usable = /** @type {Error} */ (error).name == "AbortError";
    }
    // A lock that this tab took from itself is still its own.
    if (!mine || mine == this.#release) this.#dispatch({ type: "writer", on: !usable });
    if (usable && !this.#ended.signal.aborted) this.#hold(locks, {});
  }

  /** @param {any} message */
  async #hear({ saved, handover, released }) {
    if (released) this.#released();
    else if (handover && this.#state.writer) {
      await this.flush();
      this.#release();
      this.#channel?.postMessage({ released: true });
    } else if (saved != this.#state.version) this.#dispatch({ type: "refresh" });
  }

  #tick() {
    const { timers, page } = this.#options;
    this.#poll = timers.setTimeout(() => {
      if (!page?.document.hidden && !/blocked|gone/.test(this.#state.error?.name ?? "")) this.#dispatch({ type: "refresh" });
      this.#tick();
    }, POLL);
  }

  #settle() {
    const { pending, staged, sending, conflict } = this.#state;
    if (this._opened < 1 && !(pending || staged || sending || conflict || this.#writing)) this._end();
  }
}

/** @param {Draft | string} draft */
const idOf = (draft) => (typeof draft == "string" ? draft : draft.id);
