/**
 * A page without a browser: timers that a test moves, storage and channels that tabs share, and a model of the HTTP
 * contract of a document. The router itself is tested against Postgres; here it is the client that is on trial.
 */

const MODULE = new URL("../../durable_core/documents/browser/document-session.js", import.meta.url).href;

/** The module as another tab loads it: sessions are one per user and document in each. */
export const tab = (number = 0) => import(number ? `${MODULE}?tab=${number}` : MODULE);

/** Let everything happen that waits for no timer. */
export const calm = async () => {
  for (let i = 0; i < 4; i++) await new Promise((resolve) => setImmediate(resolve));
};

export class Timers {
  #next = 1;
  #waiting = new Map();
  time = 1_000_000;
  now = () => this.time;
  setTimeout = (act, ms) => {
    this.#waiting.set(this.#next, { act, at: this.time + ms });
    return this.#next++;
  };
  clearTimeout = (timer) => void this.#waiting.delete(timer);
  /** Move on by so many milliseconds, each timer at its own moment. */
  async advance(ms) {
    const until = this.time + ms;
    await calm();
    for (;;) {
      const due = [...this.#waiting].filter(([, { at }]) => at <= until).sort(([, a], [, b]) => a.at - b.at)[0];
      if (!due) break;
      this.#waiting.delete(due[0]);
      this.time = Math.max(this.time, due[1].at);
      due[1].act();
      await calm();
    }
    this.time = until;
  }
}

/** What all tabs of one browser share. Synchronous, as localStorage is; `full` makes it refuse. */
export class Storage {
  slots = new Map();
  full = false;
  puts = [];
  put(id, slot) {
    if (this.full) throw new Error("QuotaExceededError");
    this.puts.push([id, structuredClone(slot)]);
    this.slots.set(id, structuredClone(slot));
  }
  remove(id, updated) {
    if (!updated || this.slots.get(id)?.updated == updated) this.slots.delete(id);
  }
  list(prefix) {
    return [...this.slots].filter(([id]) => id.startsWith(prefix));
  }
  /** The contents of all slots of a document. */
  contents() {
    return [...this.slots.values()].map((slot) => slot.content);
  }
}

export class Channels {
  #open = new Map();
  open = (name) => {
    const here = this.#open.get(name) ?? new Set();
    this.#open.set(name, here);
    const channel = {
      onmessage: null,
      postMessage: (data) => {
        for (const other of here) if (other != channel) setImmediate(() => other.onmessage?.({ data: structuredClone(data) }));
      },
      close: () => here.delete(channel),
    };
    here.add(channel);
    return channel;
  };
}

/** Web Locks, as far as one name, `ifAvailable` and `steal` go. */
export class Locks {
  /** How many requests wait. */
  get waiting() {
    return [...this.#queues.values()].flat().length;
  }
  #held = new Map();
  #queues = new Map();
  request(name, options, act) {
    return new Promise((resolve, reject) => {
      const grant = () => {
        const mine = { reject };
        this.#held.set(name, mine);
        Promise.resolve(act({ name })).then((value) => {
          if (this.#held.get(name) == mine) {
            this.#held.delete(name);
            this.#queues.get(name)?.shift()?.();
          }
          resolve(value);
        });
      };
      const holder = this.#held.get(name);
      if (options.steal) {
        holder?.reject(Object.assign(new Error("stolen"), { name: "AbortError" }));
        setImmediate(grant);
      } else if (!holder) setImmediate(grant);
      else if (options.ifAvailable) setImmediate(() => resolve(act(null)));
      else {
        this.#queues.set(name, [...(this.#queues.get(name) ?? []), grant]);
        options.signal?.addEventListener("abort", () => {
          this.#queues.set(name, this.#queues.get(name).filter((one) => one != grant));
          reject(options.signal.reason);
        });
      }
      if (!holder && !options.steal) this.#held.set(name, { reject });
    });
  }
}

/**
 * One document behind `fetch`. `faults` are spent one a request: "down" (never arrives), "lost" (committed, no answer),
 * "throw" (raises before it returns), "silence" (no answer ever), a Response, or a function of the request.
 * While `held`, requests wait in `waiting` for the test to let them go on.
 */
export class Server {
  /** Every version that was ever written, with its save_id. */
  chain;
  faults = [];
  held = false;
  waiting = [];
  sent = [];
  /** For each client the most saves it ever had on their way; one that it gave up is none. */
  most = [];
  gone = false;
  constructor(content, version = 0) {
    this.chain = [{ version, content, save_id: null, by: "dana" }];
  }
  get current() {
    return this.chain.at(-1);
  }
  get posts() {
    return this.sent.filter(({ method }) => method == "POST");
  }
  get gets() {
    return this.sent.filter(({ method }) => method == "GET");
  }
  /** Somebody else saves. */
  write(content, by = "erin") {
    this.chain.push({ version: this.current.version + 1, content: structuredClone(content), save_id: null, by });
  }
  /** The transport of one client. */
  line() {
    const number = this.most.push(0) - 1;
    let inFlight = 0;
    return (url, init) => {
      const answer = this.fetch(url, init);
      if (init.method != "POST") return answer;
      this.most[number] = Math.max(this.most[number], ++inFlight);
      const givenUp = new Promise((resolve) => init.signal.addEventListener("abort", resolve));
      Promise.race([answer.catch(() => {}), givenUp]).then(() => inFlight--);
      return answer;
    };
  }
  fetch = (url, init) => {
    const request = { url, method: init.method ?? "GET", headers: init.headers, keepalive: init.keepalive,
      body: init.body && JSON.parse(init.body) };
    this.sent.push(request);
    const fault = this.faults.shift();
    if (fault == "throw") throw new TypeError("refused by the transport");
    return this.#answer(request, fault, init.signal);
  };
  async #answer(request, fault, signal) {
    if (this.held) await new Promise((resolve) => this.waiting.push(resolve));
    if (fault == "down") throw new TypeError("Failed to fetch");
    if (fault == "silence")
      return new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
    if (fault instanceof Response) return fault;
    const response = typeof fault == "function" ? await fault(request) : this.#handle(request);
    if (fault == "lost") throw new TypeError("Failed to fetch");
    return response;
  }
  /** Let the oldest request that waits go on; `last` the newest. */
  async release(last = false) {
    (last ? this.waiting.pop() : this.waiting.shift())?.();
    await calm();
  }
  #handle({ method, headers, body }) {
    const { version, content, save_id, by } = this.current;
    if (this.gone) return problem(404, { reason: "unknown-document" });
    if (method == "GET") {
      if (headers["If-None-Match"] == `"${version}"`) return new Response(null, { status: 304 });
      return json(200, { id: "42", version, content, saved_by: by, saved_at: "2026-11-29T14:31:07Z" });
    }
    if (headers["Content-Type"] != "application/json") return problem(415, {});
    const { expected_version } = body;
    if (save_id && body.save_id == save_id) return json(200, { version, saved_at: null, repeated: true });
    if (expected_version != version)
      return problem(409, { reason: "version-conflict", expected_version, current_version: version, saved_by: by,
        saved_at: "2026-11-29T14:31:07Z", current: content });
    this.chain.push({ version: version + 1, content: body.content, save_id: body.save_id, by: "dana" });
    return json(201, { version: version + 1, saved_at: "2026-11-29T14:31:07Z", repeated: false });
  }
}

export const json = (status, body, headers = {}) =>
  new Response(JSON.stringify(body), { status, headers: { "Content-Type": "application/json", ...headers } });

export const problem = (status, body, headers = {}) =>
  json(status, { status, ...body }, { ...headers, "Content-Type": "application/problem+json" });

/** A page's window, as far as the session listens to it. */
export class Page extends EventTarget {
  document = Object.assign(new EventTarget(), { hidden: false });
  hide() {
    this.document.hidden = true;
    this.document.dispatchEvent(new Event("visibilitychange"));
  }
  /** Whether leaving now would ask the user. */
  asks() {
    return !this.dispatchEvent(new Event("beforeunload", { cancelable: true }));
  }
}

/** IndexedDB, as far as one store of one database goes. What deletes it waits until no connection is left. */
export class Databases {
  values = new Map();
  failing = false;
  #connections = new Set();
  #blocked = [];
  open() {
    const request = {};
    const answer = () => {
      if (this.failing) return request.onerror?.();
      const db = { transaction: () => this.#transaction(), createObjectStore() {}, close: () => this.#close(db) };
      this.#connections.add((request.result = db));
      request.onupgradeneeded?.();
      request.onsuccess?.();
    };
    setImmediate(() => (this.#blocked.length ? this.#blocked.push(answer) : answer()));
    return request;
  }
  deleteDatabase() {
    this.#blocked.push(() => this.values.clear());
    for (const db of this.#connections) db.onversionchange?.();
    this.#close();
  }
  #close(db) {
    this.#connections.delete(db);
    if (!this.#connections.size) this.#blocked.splice(0).forEach((act) => act());
  }
  #transaction() {
    const transaction = { objectStore: () => ({
      put: (value, id) => void this.values.set(id, structuredClone(value)),
      delete: (id) => void this.values.delete(id),
      get: (id) => ask(() => this.values.get(id)),
      getAll: () => ask(() => [...this.values.values()]),
      getAllKeys: () => ask(() => [...this.values.keys()]),
    }) };
    const ask = (read) => {
      const request = {};
      setImmediate(() => {
        request.result = structuredClone(read());
        request.onsuccess?.();
      });
      return request;
    };
    setImmediate(() => setImmediate(() => transaction.oncomplete()));
    return transaction;
  }
}

let documents = 0;

/** A world with one server and one browser; `open()` opens the document in a tab of it, and has it loaded. */
export function world(content = { title: "Q3" }, version = 0) {
  const timers = new Timers();
  const storage = new Storage();
  const server = new Server(content, version);
  const channels = new Channels();
  const url = `https://notes.example/briefs/${++documents}`;
  const open = async ({ tab: number = 0, loaded = true, user = "dana", ...options } = {}) => {
    const { openDocument } = await tab(number);
    const session = openDocument(options.url ?? url, {
      user, fetch: server.line(), storage, timers, page: null, locks: null, channel: null, ...options });
    if (loaded) await calm();
    return session;
  };
  return { timers, storage, server, channels, url, open };
}

/** The events of a session, as they come. */
export function heard(session) {
  const events = [];
  for (const type of ["remote", "conflict", "saved", "status"])
    session.addEventListener(type, (event) => events.push([type, event.detail]));
  return events;
}
