/** What `document-session.js` takes and gives, in words of TypeScript; no code. */

/** Any JSON value. */
export type Json = any;

/**
 * A document in this page. Events: "status"; "remote": put `content` into the editor, for it was loaded, merged,
 * recovered or saved elsewhere; "conflict"; "saved".
 */
export interface DocumentSession extends EventTarget {
  readonly url: string;
  /** What the person sees, frozen: change a copy and hand it to `edit`. Undefined before the first load. */
  readonly content: Json;
  /** The stored version that `content` is made from. */
  readonly version: number;
  readonly status: Status;
  /** Unsaved work of the user's other sessions, newest first: offered, never applied. */
  readonly drafts: Draft[];
  /** Slots that nobody can read; they can be dismissed. */
  readonly malformed: { id: string }[];
  /** In a conflict, what the server holds. */
  readonly theirs?: Stored | null;
  readonly canRebase: boolean;
  /**
   * Save this content soon; a draft of it is written at once. False: ignored, for nothing was loaded yet.
   * Raises TypeError for what is no JSON, and once the session has ended.
   */
  edit(content: Json): boolean;
  /** Keep uncommitted typing as a draft and never send it; without content, drop it. Raises as `edit` does. */
  stage(content?: Json): boolean;
  /** Save now. True once all that was edited is on the server. */
  flush(): Promise<boolean>;
  /** Look for a newer version: taken over where nothing is unsaved, else a conflict. True if it could be asked. */
  reload(): Promise<boolean>;
  /**
   * The user's own word: drop what is unsaved for what the server holds. It is fetched first; where that fails or an
   * edit comes in between, all is kept: false.
   */
  discard(): Promise<boolean>;
  /**
   * The user's own word in a conflict: save the merger of both sides upon the server's version. An edit during the
   * fetch takes part, one during the merge calls it off. False, and the conflict as it was: no merge, no confirmed
   * base, or the merge refused, failed or met a newer version.
   */
  rebase(merge?: Merge): Promise<boolean>;
  /**
   * Go on with another session's unsaved work, on the version it was made from: a conflict if that is no longer the
   * newest. False, and nothing done, unless clean.
   */
  recover(draft: { id: string }): boolean;
  /** Remove another session's draft, unless it was written again since; the own one stays, even if asked. */
  dismiss(draft: { id: string; updated?: number }): void;
  /** Write in this tab: the other one saves first, for five seconds at most, and then gives way. */
  takeOver(): Promise<void>;
  /** Save and let go. False: work is left; the session lives on, and opening the document again finds it. */
  close(): Promise<boolean>;
}

/** What a page shows of a session: `name` decides, `label` is a sentence in English, `detail` the facts beneath. */
export interface Status {
  name: StatusName;
  label: string;
  detail: Partial<Omit<Failure, "name">> & {
    unsaved: boolean;
    saving: boolean;
    /** The last write of a draft failed: nothing but this page holds what is unsaved. */
    backupFailed: boolean;
    /** How much unsaved work of other sessions is offered. */
    drafts: number;
    version: number;
    saved_by?: string | null;
    saved_at?: string | null;
  };
}

export type StatusName =
  | "unloaded"
  | "clean"
  | "dirty"
  | "saving"
  | "offline"
  | "retrying"
  | "conflict"
  | "readonly_tab"
  | "blocked"
  | "gone";

/** The last save or load failed; the next success clears it. */
export interface Failure {
  of: "read" | "save";
  name: StatusName;
  status?: number;
  reason?: string;
  detail?: string;
  /** When it is tried again of its own accord, in milliseconds; undefined: by the next edit or flush. */
  retryAt?: number;
}

export interface Stored {
  version: number;
  content: Json;
  saved_by?: string | null;
  saved_at?: string | null;
}

/** A draft as it is stored: one slot per user, document and session. */
export interface Slot {
  version: number;
  content: Json;
  /** What the server held at `version`, for a merge. */
  base?: Json;
  save_id?: string;
  /** When it was written, in milliseconds. */
  updated?: number;
}

/** Unsaved work that another session of this user left, or still has. */
export interface Draft extends Slot {
  id: string;
}

/** Returns what to save, or a promise of it; undefined refuses. All three are frozen. */
export type Merge = (base: Json, mine: Json, theirs: Json) => Json;

export interface Options {
  /** Who is signed in: keeps the drafts of people who share a browser apart. */
  user: string;
  fetch?: typeof fetch;
  /** For every request: a token against forgery, say. */
  headers?: Record<string, string> | (() => Record<string, string> | Promise<Record<string, string>>);
  /** Milliseconds from the last edit to the save; 1500. */
  debounce?: number;
  /** Without it no rebase is offered. */
  merge?: Merge;
  /** Where drafts lie: IndexedDB, or localStorage where that is missing. */
  storage?: DraftStorage;
  timers?: Timers;
  /** The browser's own; null goes without. */
  locks?: LockManager | null;
  channel?: ((name: string) => BroadcastChannel) | null;
  page?: Window | null;
}

export interface DraftStorage {
  put(id: string, slot: Slot): unknown;
  /** With `updated`, only a slot that was written then: whoever wrote it may have gone on since. */
  remove(id: string, updated?: number): unknown;
  list(prefix: string): [string, unknown][] | Promise<[string, unknown][]>;
}

/** Called as plain functions, without an object. */
export interface Timers {
  setTimeout(act: () => void, ms: number): any;
  clearTimeout(timer: any): void;
  /** `Date.now` where it is missing. */
  now?(): number;
}

/** One edit and the name of its save, which every repetition carries. */
export interface Snapshot {
  content: Json;
  saveId: string;
}

export type Why = "refresh" | "discard";

/** A read on its way, known by its identity. */
export interface Reading {
  why: Why;
  generation: number;
}

/** All that the reducer knows. */
export interface State {
  loaded?: boolean;
  /** What the local content is made from; its content is undefined where nobody knows it. */
  base: Stored;
  pending?: Snapshot | null;
  staged?: { content: Json } | null;
  sending?: Snapshot | null;
  /** Sent on this base and never answered: any of them may be what the server holds. */
  lost: Snapshot[];
  conflict?: Stored | null;
  error?: Failure | null;
  backupFailed?: boolean;
  drafts: Draft[];
  malformed: { id: string }[];
  /** Grows with every edit, stage, and start and end of a save: a read that spans one is dropped. */
  generation: number;
  reading?: Reading | null;
  /** A read that waits for the save in flight. */
  want?: Why | null;
  /** Whether this tab may save; null until the lock has answered. */
  writer: boolean | null;
  /** When the first edit, recovery or merge came that no save has tried yet; 0: none. */
  since: number;
  /** Until then the server asked for quiet. */
  until: number;
  tries: number;
  debounce: number;
}

/** What a request came to: status 0 is no answer at all. */
export interface Answer {
  status: number;
  data?: any;
  /** Milliseconds that the server asked for; 0: none. */
  wait?: number;
  offline?: boolean;
}

/** What can happen, without the moment. */
export type Happening =
  | { type: "edit"; content: Json; saveId: string }
  | { type: "stage"; content: Json }
  /** `due`: the timer ran out. A clock that was set back, or that a browser rounds, does not say so. */
  | { type: "flush"; due?: boolean }
  | { type: Why }
  | { type: "sent"; answer: Answer }
  | { type: "read"; reading: Reading; answer: Answer }
  | { type: "drafts"; drafts: Draft[]; malformed: { id: string }[] }
  | { type: "recover"; id: string; saveId: string }
  | { type: "rebased"; stored: Stored; content: Json; generation: number; saveId: string }
  | { type: "writer"; on: boolean }
  | { type: "backup"; ok: boolean };

/** `jitter` is a random number below 1. */
export type Moment = Happening & { now: number; jitter?: number };

export type Effect =
  /** Without `ms` the timer stops. */
  | { do: "arm"; ms?: number }
  | { do: "list" }
  | { do: "send"; body: string }
  /** `known`: the version whose content is at hand. */
  | { do: "read"; reading: Reading; known?: number }
  /** Without `slot` our own is removed; `retire` goes once ours is written, if it is still as it was found. */
  | { do: "draft"; slot?: Slot | null; retire?: Draft }
  | { do: "emit"; type: "remote" | "conflict" | "saved"; detail: Stored };
