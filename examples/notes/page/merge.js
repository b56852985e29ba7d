/** Both sides' notes: each note as whoever changed it left it, and as mine where both did. */
export function merge(base, mine, theirs) {
  const find = ({ notes }, id) => notes.find((note) => note.id === id);
  const text = (board, id) => find(board, id)?.text;
  const order = [...theirs.notes, ...mine.notes.filter(({ id }) => !find(theirs, id))];
  const notes = [];
  for (const { id } of order) {
    const was = text(base, id);
    const iChanged = text(mine, id) !== was;
    const theyChanged = text(theirs, id) !== was;
    // Removed by one and changed by the other: it stays, for a person to remove again.
    const kept = iChanged ? find(mine, id) ?? (theyChanged ? find(theirs, id) : undefined) : find(theirs, id);
    if (kept) notes.push(kept);
  }
  return { title: mine.title === base.title ? theirs.title : mine.title, notes };
}
