/**
 * A versioned document in a page, where nothing typed is lost: a pure reducer decides, a session acts.
 * Promises: document-session.types.d.ts.
 *
 * @import * as T from "./document-session.types.js"
 */

const LONGEST = 10000;
const TIMEOUT = 15000;
const POLL = 30000;
const HANDOVER = 5000;
const KEEPALIVE = 60000;
const MONTH = 2592e6;

/** @type {T.State} */
export const unloaded = {
	base: { version: 0, content: undefined }, lost: [], drafts: [], malformed: [], generation: 0, since: 0, until: 0, tries: 0,
	writer: true, debounce: 1500,
};

/** @param {T.State} s */
export const local = (s) => (s.staged ?? s.pending ?? s.base).content;

/** Postgres keeps no order of keys. @param {T.Json} value */
const canonical = (value) =>
	JSON.stringify(value, (_, v) => v && typeof v == "object" && !Array.isArray(v)
		? Object.fromEntries(Object.entries(v).sort()) : v);
/** @param {T.Json} a @param {T.Json} b */
const same = (a, b) => canonical(a) == canonical(b);

/** @param {T.State} s @param {T.Moment} e @returns {[T.State, T.Effect[]]} */
export function reduce(s, e) {
	/** @type {T.Effect[]} */
	const effects = [];
	s = { ...s };
	const unsaved = () => s.pending || s.staged;
	/** @param {T.Draft} [retire] */
	const draft = (retire) => {
		const { base: { version, content: base }, pending, staged } = s;
		const slot = unsaved() && { version, base, content: local(s), save_id: staged ? undefined : pending?.saveId };
		effects.push({ do: "draft", slot, retire });
	};
	const remote = () => effects.push({ do: "emit", type: "remote", detail: { ...s.base, content: local(s) } });
	/** @param {number} [at] */
	const arm = (at) => effects.push({ do: "arm", ms: at && at - e.now });
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
		effects.push({ do: "send", body: JSON.stringify({ expected_version: s.base.version, save_id: saveId, content }) });
	};
	/** @param {T.Why} why */
	const read = (why) => {
		s.want = null;
		if (why == "discard") arm();
		s.reading = { why, generation: s.generation };
		effects.push({ do: "read", reading: s.reading, known: s.base.content === undefined ? undefined : s.base.version });
	};
	/** @param {T.Stored} from */
	const adopt = (from) => {
		s.base = from;
		s.lost = [];
		s.tries = s.until = 0;
		s.error = null;
	};
	/** A newer snapshot stays. @param {T.Snapshot} sent @param {T.Stored} from */
	const acknowledge = (sent, from) => {
		adopt(from);
		if (s.pending?.saveId == sent.saveId) s.pending = null;
		draft();
		effects.push({ do: "emit", type: "saved", detail: from });
	};
	/** Our own write whose answer was lost is no conflict. @param {T.Stored} from @param {T.Snapshot | null} [sent] */
	const differ = (from, sent = s.pending) => {
		const own = s.conflict ? null : [sent, ...s.lost].find((one) => one && same(one.content, from.content));
		if (own) return acknowledge(own, from);
		if (!s.conflict) effects.push({ do: "emit", type: "conflict", detail: from });
		s.conflict = from;
		arm();
	};
	/** @param {string} saveId @param {T.Json} content */
	const pend = (saveId, content) => {
		s.pending = { saveId, content };
		s.since ||= e.now;
		s.staged = null;
		s.generation++;
	};
	/** @param {"read" | "save"} of @param {T.Answer} answer */
	const fail = (of, { status, data, offline, wait }) => {
		const slow = status == 429 || status == 503;
		// No answer, or a proxy's.
		const lost = status < 400 || status == 502 || status == 504;
		/** @type {T.Failure} */
		const error = { of, status, reason: data?.reason, detail: data?.detail ?? data?.title,
			name: slow || lost ? offline ? "offline" : "retrying" : status == 404 || status == 410 ? "gone" : "blocked" };
		s.error = error;
		if ((!slow && !lost) || (of == "read" && s.loaded)) return;
		const ms = wait || 2 ** Math.min(s.tries++, 6) * (500 + 500 * (e.jitter ?? 1));
		error.retryAt = e.now + ms;
		if (slow) s.until = error.retryAt;
		arm(error.retryAt);
	};

	switch (e.type) {
		case "edit":
		case "stage":
			if (!s.loaded) break;
			if (e.type == "edit") {
				pend(e.saveId, e.content);
				schedule();
			} else {
				s.staged = e.content === undefined ? null : e;
				s.generation++;
			}
			draft();
			break;
		case "flush":
			if (e.due) s.until = 0;
			if (s.loaded) send();
			else read("refresh");
			break;
		case "refresh":
		case "discard":
			if (e.type == "refresh") {
				if (s.reading?.why == "discard" || s.want) break;
				// Its save_id tells our own write; a read does not.
				if (s.error?.retryAt) send();
			}
			if (s.sending) s.want = e.type;
			else read(e.type);
			break;
		case "sent": {
			const { status, data } = e.answer;
			const sent = s.sending;
			if (!sent) break;
			s.sending = null;
			s.generation++;
			if (status < 300 && isVersion(data?.version)) {
				acknowledge(sent, { ...data, content: sent.content });
			} else if ((status == 409 || status == 412) && isVersion(data?.current_version)) {
				differ({ ...data, version: data.current_version, content: data.current }, sent);
			} else {
				// It may have arrived.
				if (status < 400 || status > 499) s.lost = [...s.lost.filter((one) => one.saveId != sent.saveId), sent].slice(-9);
				fail("save", e.answer);
				if (!s.error?.retryAt && s.pending?.saveId != sent.saveId) schedule();
			}
			if (!s.error && s.want != "discard") send();
			if (!s.sending && s.want) read(s.want);
			break;
		}
		case "read": {
			const { status, data } = e.answer;
			const { reading } = e;
			if (reading != s.reading) break;
			s.reading = null;
			const discard = reading.why == "discard";
			const from = status == 304 ? s.base : data;
			const good = status == 304 || (status < 300 && isVersion(data?.version));
			const raced = reading.generation != s.generation;
			// It had stopped the timer.
			if (discard && (raced || !good)) s.error ? s.error.retryAt && arm(s.error.retryAt) : schedule();
			if (!good) {
				if (s.error?.of != "save") fail("read", e.answer);
			} else if (!raced) {
				if (s.error?.of == "read") {
					s.error = null;
					schedule();
				}
				if (discard || !unsaved()) {
					const known = s.loaded && !discard && from.version == s.base.version;
					adopt(from);
					s.loaded = true;
					s.pending = s.staged = s.conflict = null;
					if (discard) draft();
					if (!known) remote();
					effects.push({ do: "list" });
				} else if (from.version == s.base.version) s.base = from;
				else {
					differ(from);
					schedule();
				}
			}
			break;
		}
		case "drafts":
			s.malformed = e.malformed;
			s.drafts = e.drafts.filter(({ content }) => !same(content, s.base.content));
			break;
		case "recover": {
			const found = s.drafts.find(({ id }) => id == e.id);
			if (!found || unsaved() || s.sending) break;
			s.drafts = s.drafts.filter((one) => one != found);
			const { version, content, base, save_id } = found;
			if (version != s.base.version) {
				s.conflict = s.base;
				effects.push({ do: "emit", type: "conflict", detail: s.base });
				s.base = { version, content: base };
			}
			pend(save_id || e.saveId, content);
			draft(found);
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

/** @param {T.State} s @returns {T.Status} */
export function statusOf(s) {
	const unsaved = !!(s.pending || s.staged);
	const name = s.conflict ? "conflict" : s.error && (s.writer || s.error.of == "read") ? s.error.name : !s.loaded ? "unloaded"
		: s.writer === false ? "readonly_tab" : s.sending ? "saving" : unsaved ? "dirty" : "clean";
	const { saved_by, saved_at, version } = s.conflict ?? s.base;
	const { status, detail } = s.error ?? {};
	const label = {
		unloaded: "Loading…",
		clean: "All changes saved",
		dirty: "Editing…",
		saving: "Saving…",
		offline: "Offline. Your text is kept",
		retrying: "Cannot reach the server. Your text is kept",
		conflict: `${saved_by || "Somebody"} saved a newer version`,
		readonly_tab: "Open in another tab",
		blocked: status == 401 ? "Signed out. Your text is kept" : status == 413 ? "Too large" : `Not accepted: ${detail || status}`,
		gone: "This document was deleted. Copy your text",
	}[name] + (s.conflict && saved_at ? ` at ${new Date(saved_at).toLocaleTimeString([], { timeStyle: "short" })}` : "");
	return {
		name,
		label: s.backupFailed && unsaved ? `${label}. No copy is kept` : label,
		detail: { ...s.error, unsaved, saving: !!s.sending, backupFailed: !!s.backupFailed,
			drafts: s.drafts.length, version, saved_by, saved_at },
	};
}

/** @param {any} value */
const isVersion = (value) => Number.isSafeInteger(value) && value >= 0;

/** Frozen, for merges; undefined for no JSON. @param {string} text */
const parse = (text) => {
	try {
		return JSON.parse(text, (_, value) => Object.freeze(value));
	} catch {}
};

/** @param {T.Json} value */
const copy = (value) => parse(JSON.stringify(value));

/** In insecure contexts, too. */
const uuid = () => {
	const url = URL.createObjectURL(new Blob());
	URL.revokeObjectURL(url);
	return url.slice(-36);
};

/** @param {string[]} parts */
const slotId = (...parts) => ["durable", ...parts].map(encodeURIComponent).join("/");

/** @type {Promise<IDBDatabase> | null} */
let opened = null;
const database = () =>
	(opened ??= new Promise((resolve, reject) => {
		const request = indexedDB.open("durable", 1);
		request.onupgradeneeded = () => request.result.createObjectStore("drafts");
		const closed = (request.onerror = () => reject((opened = null)));
		request.onsuccess = () => {
			const db = request.result;
			// A deletion waits for us, and later pages for it.
			db.onclose = db.onversionchange = () => {
				db.close();
				closed();
			};
			resolve(db);
		};
	}));

/** Without IndexedDB the slot is there when `edit` returns.
 * @param {(store: IDBObjectStore) => any} act @param {() => any} otherwise */
const inStore = async (act, otherwise) => {
	if (!globalThis.indexedDB) return otherwise();
	const db = await database();
	return new Promise((resolve, reject) => {
		const transaction = db.transaction("drafts", "readwrite", { durability: "strict" });
		const result = act(transaction.objectStore("drafts"));
		transaction.oncomplete = () => resolve(result);
		transaction.onabort = () => reject(transaction.error);
	});
};

/** @type {T.DraftStorage} */
const browserStorage = {
	put: (id, slot) => inStore((store) => store.put(slot, id), () => localStorage.setItem(id, JSON.stringify(slot))),
	remove: (id, updated) => inStore(
		(store) => {
			const found = store.get(id);
			found.onsuccess = () => {
				if (!updated || found.result?.updated == updated) store.delete(id);
			};
		},
		() => (!updated || parse(localStorage[id])?.updated == updated) && localStorage.removeItem(id)),
	list: async (prefix) => {
		const [ids, slots] = await inStore(
			(store) => [store.getAllKeys(), store.getAll()],
			() => [{ result: Object.keys(localStorage) }, { result: Object.values(localStorage).map(parse) }]);
		return ids.result.map((/** @type {string} */ id, /** @type {number} */ at) => [id, slots.result[at]])
			.filter((/** @type {[string]} */ [id]) => `${id}`.startsWith(prefix));
	},
};

/** Bytes on their way that outlive the page, of 64 KiB in all. */
let kept = 0;

/** @type {Map<string, {session: T.DocumentSession, opened: number, end(): Promise<unknown>}>} */
const sessions = new Map();

/** One session per user and address in a page, however often it is opened.
 * @param {string} url @param {T.Options} options */
export function openDocument(url, options) {
	if (!options?.user) throw new TypeError("no user");
	const href = new URL(url, globalThis.location?.href).href;
	const id = slotId(options.user, href);
	const found = sessions.get(id);
	if (!found) return start(href, id, options);
	found.opened++;
	return found.session;
}

/** For signing out: end the user's sessions and remove all their drafts from this browser. What is not saved is gone.
 * @param {string} user @param {T.DraftStorage} [storage] */
export async function clearDrafts(user, storage = browserStorage) {
	const prefix = `${slotId(user)}/`;
	for (const [id, { end }] of sessions) if (id.startsWith(prefix)) await end();
	for (const [id] of await storage.list(prefix)) await storage.remove(id);
}

/** @param {string} href @param {string} id @param {T.Options} options */
function start(href, id, options) {
	const { window, navigator, BroadcastChannel } = /** @type {any} */ (globalThis);
	const { page = window, locks = navigator?.locks, storage = browserStorage, debounce = 1500 } = options;
	const { channel: open = page && BroadcastChannel && ((name) => new BroadcastChannel(name)) } = options;
	/** @type {BroadcastChannel | undefined} */
	let channel;
	try {
		channel = open?.(id);
	} catch {
		// Firefox, without cookies.
	}
	const { setTimeout, clearTimeout, now = Date.now } = /** @type {T.Timers} */ (options.timers ?? globalThis);
	const own = `${id}/${uuid()}`;
	const ending = new AbortController();
	const { signal } = ending;
	/** @type {T.State} */
	let state = { ...unloaded, debounce, writer: locks ? null : true };
	/** @type {T.Effect[]} */
	const todo = [];
	/** @type {((_: unknown) => void)[]} */
	const waiting = [];
	/** @type {T.Slot | null | undefined} */
	let slot;
	/** @type {T.Draft[]} */
	const retired = [];
	/** @type {Promise<void> | null} */
	let writing = null;
	let timer = 0;
	let poll = 0;
	let running = false;
	let shown = "";
	let release = () => {};
	let released = () => {};

	/** @param {T.Happening} event */
	const dispatch = (event) => {
		if (signal.aborted) return;
		const [next, effects] = reduce(state, { ...event, now: now(), jitter: Math.random() });
		state = next;
		todo.push(...effects);
		// A listener may edit.
		if (running) return;
		running = true;
		do for (let effect; (effect = todo.shift()); ) act(effect);
		while (tell());
		running = false;
		wake();
		settle();
	};
	const tell = () => {
		const { status } = session;
		const text = JSON.stringify(status);
		if (text == shown) return;
		shown = text;
		return emit("status", status);
	};
	const wake = () => waiting.splice(0).forEach((resolve) => resolve(0));
	/** @param {() => unknown} test */
	const until = async (test) => {
		while (!signal.aborted && !test()) await new Promise((resolve) => waiting.push(resolve));
	};
	const idle = () => until(() => !state.sending);
	/** @param {string} type @param {unknown} detail */
	const emit = (type, detail) => session.dispatchEvent(new CustomEvent(type, { detail }));
	/** @param {T.Happening} event */
	const alter = (event) => {
		if (signal.aborted || (event.type == "edit" && event.content === undefined))
			throw new TypeError("no JSON value, or the session has ended");
		dispatch(event);
		return !!state.loaded;
	};
	/** @param {T.Why} type */
	const read = async (type) => {
		dispatch({ type });
		await until(() => !state.reading && !state.want);
		return !!state.loaded && !state.error;
	};

	/** @param {T.Effect} effect */
	const act = (effect) => {
		switch (effect.do) {
			case "arm":
				clearTimeout(timer);
				if (effect.ms !== undefined) timer = setTimeout(() => dispatch({ type: "flush", due: true }), effect.ms);
				break;
			case "send":
				send(effect.body);
				break;
			case "read":
				request("", {}, effect.known === undefined ? {} : { "If-None-Match": `"${effect.known}"` })
					.then((answer) => dispatch({ type: "read", reading: effect.reading, answer }));
				break;
			case "draft":
				slot = effect.slot ?? null;
				if (effect.retire) retired.push(effect.retire);
				writing ??= write();
				break;
			case "list":
				attempt(list);
				break;
			case "emit":
				if (effect.type == "saved") channel?.postMessage({ saved: effect.detail.version });
				emit(effect.type, effect.detail);
		}
	};

	/** @param {string} body */
	const send = async (body) => {
		const bytes = new Blob([body]).size;
		const keepalive = kept + bytes <= KEEPALIVE;
		if (keepalive) kept += bytes;
		const answer = await request("/versions", { method: "POST", body, keepalive }, { "Content-Type": "application/json" });
		if (keepalive) kept -= bytes;
		dispatch({ type: "sent", answer });
	};

	/** Never raises. @param {string} path @param {RequestInit} [init] @param {Record<string, string>} [extra]
	 * @returns {Promise<T.Answer>} */
	const request = async (path, init, extra) => {
		const abort = new AbortController();
		const none = { status: 0, offline: navigator?.onLine === false };
		let late = 0;
		const answer = async () => {
			const url = new URL(href);
			url.pathname += path;
			const { headers, fetch: transport = fetch } = options;
			const response = await transport(url.href, {
				...init, cache: "no-store", redirect: "manual", signal: abort.signal,
				headers: { ...extra, ...(typeof headers == "function" ? await headers() : headers) } });
			// A sign-in page.
			const status = response.type == "opaqueredirect" ? 401 : response.status;
			const wait = 1000 * Math.min(3600, Number(response.headers.get("Retry-After")));
			return { status, wait, data: parse(await response.text()) };
		};
		try {
			return await Promise.race([answer(), new Promise((resolve) => {
				late = setTimeout(() => {
					resolve(none);
					abort.abort();
				}, TIMEOUT);
			})]);
		} catch {
			return none;
		} finally {
			clearTimeout(late);
		}
	};

	/** @param {() => unknown} keep */
	const attempt = async (keep) => {
		try {
			await keep();
			return true;
		} catch {
			dispatch({ type: "backup", ok: false });
			return false;
		}
	};

	const write = async () => {
		while (slot !== undefined) {
			const record = slot;
			slot = undefined;
			const ok = await attempt(async () => {
				await (record ? storage.put(own, { ...record, updated: now() }) : storage.remove(own));
				for (let other; record && (other = retired.shift()); ) await storage.remove(other.id, other.updated);
			});
			if (ok) dispatch({ type: "backup", ok });
		}
		writing = null;
		settle();
	};

	const list = async () => {
		const drafts = [];
		const malformed = [];
		for (const [key, value] of await storage.list("durable/")) {
			const { version, content, updated } = /** @type {any} */ (value ?? {});
			const good = isVersion(version) && content !== undefined && typeof updated == "number";
			if (key == own) continue;
			const here = key.startsWith(`${id}/`);
			// Saved by a tab that died.
			const saved = here && version < state.base.version && same(content, state.base.content);
			if (good && (saved || updated < now() - MONTH)) await storage.remove(key, updated);
			else if (here) good ? drafts.push({ ...copy(value), id: key }) : malformed.push({ id: key });
		}
		drafts.sort((a, b) => b.updated - a.updated);
		dispatch({ type: "drafts", drafts, malformed });
	};

	/** While the lock is ours we are the tab that writes. @param {LockOptions} how */
	const hold = async (how) => {
		let usable = true;
		/** @type {(() => void) | undefined} */
		let mine;
		try {
			await locks.request(id, how, (/** @type {Lock | null} */ lock) => {
				if (!lock || signal.aborted) return;
				dispatch({ type: "writer", on: true });
				return new Promise((resolve) => (release = mine = () => resolve(0)));
			});
		} catch (error) {
			// No steal, so no locks: versions alone keep it safe.
			usable = /** @type {Error} */ (error).name == "AbortError";
		}
		// Taken from ourselves it is still ours.
		if (!mine || mine == release) dispatch({ type: "writer", on: !usable });
		if (usable && !signal.aborted) hold({ signal });
	};

	const tick = () => {
		poll = setTimeout(() => {
			const waits = /blocked|gone/.test(session.status.name) || (state.writer && state.error?.retryAt);
			if (!page?.document.hidden && !waits) dispatch({ type: "refresh" });
			tick();
		}, POLL);
	};

	const settle = () => {
		const { pending, staged, sending, conflict } = state;
		if (entry.opened < 1 && !(pending || staged || sending || conflict || writing)) entry.end();
	};

	/** @type {Omit<T.DocumentSession, keyof EventTarget>} */
	const face = {
		url: href,
		get content() { return local(state); },
		get version() { return state.base.version; },
		get status() { return statusOf(state); },
		get drafts() { return state.drafts; },
		get malformed() { return state.malformed; },
		get theirs() { return state.conflict; },
		get canRebase() { return !!(options.merge && state.conflict && state.base.content !== undefined); },
		edit: (content) => alter({ type: "edit", content: copy(content), saveId: uuid() }),
		stage: (content) => alter({ type: "stage", content: copy(content) }),
		async flush() {
			dispatch({ type: "flush" });
			await idle();
			return !!state.loaded && !state.pending;
		},
		reload: () => read("refresh"),
		discard: async () => (await read("discard")) && !(state.pending || state.staged || state.conflict),
		async rebase(merge = options.merge) {
			if (!merge || !state.conflict || state.base.content === undefined) return false;
			try {
				const { status, data } = await request("");
				const { generation, base } = state;
				if (status > 299 || !isVersion(data?.version)) return false;
				const content = copy(await merge(base.content, local(state), data.content));
				if (content !== undefined) dispatch({ type: "rebased", stored: data, content, generation, saveId: uuid() });
			} catch {
				// The conflict stays.
			}
			await idle();
			return !state.conflict;
		},
		recover({ id }) {
			const { generation } = state;
			dispatch({ type: "recover", id, saveId: uuid() });
			return state.generation != generation;
		},
		dismiss(draft) {
			if (draft.id != own && draft.id.startsWith(`${id}/`)) attempt(async () => {
				await storage.remove(draft.id, draft.updated);
				await list();
			});
		},
		async takeOver() {
			if (state.writer) return;
			await new Promise((resolve) => {
				released = () => resolve(0);
				setTimeout(released, HANDOVER);
				channel?.postMessage({ handover: true });
			});
			if (!state.writer) hold({ steal: true });
			await until(() => state.writer && !state.reading);
		},
		async close() {
			entry.opened--;
			const saved = await session.flush();
			settle();
			await writing;
			return saved;
		},
	};
	const session = /** @type {T.DocumentSession} */ (
		Object.defineProperties(new EventTarget(), Object.getOwnPropertyDescriptors(face)));
	const entry = {
		session,
		opened: 1,
		async end() {
			if (sessions.get(id) == entry) sessions.delete(id);
			ending.abort();
			clearTimeout(timer);
			clearTimeout(poll);
			release();
			channel?.close();
			wake();
			await writing;
		},
	};
	sessions.set(id, entry);

	/** @param {any} on @param {string} types @param {(event: Event) => void} heard */
	const listen = (on, types, heard) => types.split(" ").forEach((type) => on?.addEventListener(type, heard, { signal }));
	// A refusal stands.
	const leave = () => void ((state.since || state.error?.retryAt) && session.flush());
	const look = () => page.document.hidden ? leave() : dispatch({ type: "refresh" });
	listen(page?.document, "visibilitychange", look);
	listen(page, "focus online", look);
	listen(page, "pagehide", leave);
	listen(page, "beforeunload", (event) => {
		const { name, detail } = session.status;
		if (detail.unsaved && (detail.backupFailed || /blocked|conflict|gone/.test(name))) event.preventDefault();
	});
	if (channel) channel.onmessage = async (/** @type {MessageEvent} */ { data: { saved, handover, released: free } }) => {
		if (free) released();
		else if (handover && state.writer) {
			await session.flush();
			release();
			channel.postMessage({ released: true });
		} else if (saved != state.base.version) dispatch({ type: "refresh" });
	};
	if (locks) hold({ ifAvailable: true });
	dispatch({ type: "refresh" });
	tick();
	return session;
}
