/** @param {T.State} s @param {T.Moment} e @returns {[T.State, T.Effect[]]} */
export function reduce(s: T.State, e: T.Moment): [T.State, T.Effect[]];
/** @param {T.State} s @returns {T.Status} */
export function statusOf(s: T.State): T.Status;
/** One session per user and address in a page, however often it is opened.
 * @param {string} url @param {T.Options} options */
export function openDocument(url: string, options: T.Options): T.DocumentSession;
/** For signing out: end the user's sessions and remove all their drafts from this browser. What is not saved is gone.
 * @param {string} user @param {T.DraftStorage} [storage] */
export function clearDrafts(user: string, storage?: T.DraftStorage): Promise<void>;
/** @type {T.State} */
export const unloaded: T.State;
export function local(s: T.State): any;
import type * as T from "./document-session.types.js";
