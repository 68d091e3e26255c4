"""The tables and views of a log file, as SQL.

Invariant: `events`, `texts` and `bodies` are the truth and append-only by triggers. `messages`, `spans`, `decisions`,
`usage` and `conversations` are views over them, so they cannot disagree. `span_ids` alone is derived (SQLite has no
SHA-256 to compute a span's id in a view); `verify` derives it again. The views need nothing but the plain shell.

A body is TEXT where SQLite can hold it as such, else (a NUL or a lone surrogate in a note) a BLOB of its WTF-8 bytes.
A message's JSON is ASCII, so always TEXT; where one of its strings holds a NUL or a lone surrogate the views say
`exact` = 0 and show NULL for text taken out of it. `log.restore` is always exact.
"""

from __future__ import annotations

__all__ = ["APPLICATION_ID", "SHARE_ABOVE", "TABLES", "VIEWS"]

APPLICATION_ID = 0x6B76636C
"""Marks the file as ours in its header ("kvcl")."""

SHARE_ABOVE = 200
"""Bodies longer than this many characters are stored once. Below, sharing costs more bytes than it saves."""

TABLES: tuple[str, ...] = (
    """CREATE TABLE events (
  id INTEGER PRIMARY KEY,
  conversation TEXT NOT NULL,
  seq INTEGER NOT NULL,
  kind TEXT NOT NULL,
  at TEXT NOT NULL,
  payload TEXT NOT NULL,
  hash BLOB NOT NULL,
  UNIQUE (conversation, seq)
) STRICT""",
    """CREATE TABLE texts (
  digest TEXT PRIMARY KEY,
  salt BLOB,
  body ANY,
  shared INTEGER
) STRICT, WITHOUT ROWID""",
    """CREATE TABLE bodies (
  id INTEGER PRIMARY KEY,
  lookup BLOB UNIQUE,
  body ANY
) STRICT""",
    """CREATE TABLE span_ids (
  decision INTEGER NOT NULL,
  position INTEGER NOT NULL,
  id TEXT NOT NULL,
  PRIMARY KEY (decision, position)
) STRICT, WITHOUT ROWID""",
    "CREATE INDEX span_ids_id ON span_ids(id)",
    """CREATE UNIQUE INDEX events_message ON events(json_extract(payload, '$.message'))
WHERE kind = 'appended'""",
    """CREATE INDEX events_decision ON events(conversation, seq)
WHERE kind = 'decision_committed'""",
    # Plain INSERT and INSERT OR REPLACE both pass here; OR REPLACE would otherwise delete without the delete trigger.
    """CREATE TRIGGER events_append BEFORE INSERT ON events
WHEN new.id IS NOT (SELECT coalesce(max(id), 0) + 1 FROM events)
  OR new.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM events WHERE conversation = new.conversation)
BEGIN SELECT RAISE(ABORT, 'events are append-only: the next id and the next seq come next'); END""",
    """CREATE TRIGGER events_update BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
    """CREATE TRIGGER events_delete BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
    """CREATE TRIGGER texts_append BEFORE INSERT ON texts
WHEN EXISTS (SELECT 1 FROM texts WHERE digest = new.digest)
BEGIN SELECT RAISE(ABORT, 'texts are append-only'); END""",
    """CREATE TRIGGER texts_update BEFORE UPDATE ON texts
BEGIN SELECT RAISE(ABORT, 'texts are append-only'); END""",
    """CREATE TRIGGER texts_delete BEFORE DELETE ON texts
BEGIN SELECT RAISE(ABORT, 'texts are append-only'); END""",
    """CREATE TRIGGER bodies_append BEFORE INSERT ON bodies
WHEN EXISTS (SELECT 1 FROM bodies WHERE id = new.id OR lookup = new.lookup)
BEGIN SELECT RAISE(ABORT, 'bodies are append-only'); END""",
    """CREATE TRIGGER bodies_update BEFORE UPDATE ON bodies
BEGIN SELECT RAISE(ABORT, 'bodies are append-only'); END""",
    """CREATE TRIGGER bodies_delete BEFORE DELETE ON bodies
BEGIN SELECT RAISE(ABORT, 'bodies are append-only'); END""",
    """CREATE TRIGGER span_ids_append BEFORE INSERT ON span_ids
WHEN EXISTS (SELECT 1 FROM span_ids WHERE decision = new.decision AND position = new.position)
BEGIN SELECT RAISE(ABORT, 'span_ids are append-only'); END""",
    """CREATE TRIGGER span_ids_update BEFORE UPDATE ON span_ids
BEGIN SELECT RAISE(ABORT, 'span_ids are append-only'); END""",
    """CREATE TRIGGER span_ids_delete BEFORE DELETE ON span_ids
BEGIN SELECT RAISE(ABORT, 'span_ids are append-only'); END""",
)

# In JSON with its `\\` pairs blanked out, a surrogate escape is lone where a high one is not followed by a low one
# (first four patterns) or a low one does not follow a high one (last four). GLOB has no alternation and no negative
# look-around, so each of the four characters that make up the neighbour is denied in turn.
_LONE = (
    r"*\ud[89ab]??[^\]*",
    r"*\ud[89ab]??\[^u]*",
    r"*\ud[89ab]??\u[^d]*",
    r"*\ud[89ab]??\ud[^cdef]*",
    r"*[^\]?????\ud[cdef]*",
    r"*\[^u]????\ud[cdef]*",
    r"*\u[^d]???\ud[cdef]*",
    r"*\ud[^89ab]??\ud[cdef]*",
)


def _exact(json: str) -> str:
    """SQL: 1 where every string of a JSON text comes out of SQLite unharmed, 0 where not, NULL without a text."""
    blanked = rf"'xxxxxx' || replace({json}, '\\', 'xx')"
    lone = " OR ".join(f"{blanked} GLOB '{pattern}'" for pattern in _LONE)
    return (
        f"CASE WHEN {json} IS NULL THEN NULL WHEN NOT json_valid({json}) THEN 0 WHEN instr({json}, '\\u') = 0 THEN 1 "
        f"WHEN instr({blanked}, '\\u0000') THEN 0 WHEN instr({json}, '\\ud') = 0 THEN 1 ELSE NOT ({lone}) END"
    )


def _note(digest: str) -> str:
    """SQL for the text under a digest."""
    join = "texts n LEFT JOIN bodies o ON o.id = n.shared"
    return f"(SELECT coalesce(n.body, o.body) FROM {join} WHERE n.digest = {digest})"


# Follows a JSON Pointer key by key. SQLite's own path syntax cannot name a key that holds a quote, and takes "2" and 2
# for different things where a pointer does not.
_POINTED = """(
    WITH RECURSIVE walk(rest, value, type) AS (
      SELECT x.path, x.message_json, 'object'
      UNION ALL
      SELECT CASE instr(substr(rest, 2), '/') WHEN 0 THEN '' ELSE substr(rest, instr(substr(rest, 2), '/') + 1) END,
        j.value, j.type
      FROM walk, json_each(CASE WHEN walk.type IN ('object', 'array') THEN walk.value ELSE '[]' END) j
      WHERE rest <> '' AND CAST(j.key AS TEXT) = replace(replace(
        substr(rest, 2,
          CASE instr(substr(rest, 2), '/') WHEN 0 THEN length(rest) ELSE instr(substr(rest, 2), '/') - 1 END),
        '~1', '/'), '~0', '~')
    )
    SELECT value FROM walk WHERE rest = ''
  )"""

# The n-th digest of a plan has the n-th summary of the decision.
_SUMMARY = """json_extract(x.payload, '$.summaries[' || (
      SELECT count(*) FROM json_each(x.payload, '$.plan') p
      WHERE p.key < x.act_index AND json_extract(p.value, '$.do') = 'digest') || '].t')"""

VIEWS: tuple[str, ...] = (
    """CREATE VIEW conversations AS
SELECT conversation,
  count(*) AS events,
  count(CASE WHEN kind = 'appended' THEN 1 END) AS messages,
  coalesce(sum(CASE WHEN kind = 'appended' THEN json_extract(payload, '$.tokens') END), 0) AS tokens,
  count(CASE WHEN kind = 'decision_committed' THEN 1 END) AS decisions,
  min(at) AS first_at,
  max(at) AS last_at
FROM events GROUP BY conversation""",
    f"""CREATE VIEW messages AS
SELECT conversation, seq, message_id, role, tokens, counter, at, exact,
  CASE WHEN exact OR json_type(json, '$.content') = 'array' THEN json_extract(json, '$.content') END AS content,
  json
FROM (
  SELECT e.conversation, e.seq, e.at,
    json_extract(e.payload, '$.message') AS message_id,
    json_extract(e.payload, '$.role') AS role,
    json_extract(e.payload, '$.tokens') AS tokens,
    json_extract(e.payload, '$.counter') AS counter,
    {_exact("coalesce(t.body, b.body)")} AS exact,
    coalesce(t.body, b.body) AS json
  FROM events e
  LEFT JOIN texts t ON t.digest = json_extract(e.payload, '$.text')
  LEFT JOIN bodies b ON b.id = t.shared
  WHERE e.kind = 'appended'
)""",
    """CREATE VIEW decisions AS
SELECT id AS event, conversation, seq, at,
  json_extract(payload, '$.trigger') AS "trigger",
  json_extract(payload, '$.policy.name') AS policy,
  json_extract(payload, '$.policy.version') AS version,
  json_extract(payload, '$.policy.params') AS params,
  json_extract(payload, '$.rung') AS rung,
  json_extract(payload, '$.limits') AS limits,
  json_extract(payload, '$.target') AS target,
  json_extract(payload, '$.before') AS before,
  json_extract(payload, '$.after') AS after,
  json_extract(payload, '$.before.tokens') AS tokens_before,
  json_extract(payload, '$.after.tokens') AS tokens_after,
  json_extract(payload, '$.after.reusable_tokens') AS reusable_tokens,
  (SELECT json_group_array(json_extract(a.value, '$.do')) FROM json_each(payload, '$.plan') a) AS actions,
  json_array_length(payload, '$.spans') AS spans,
  (SELECT coalesce(sum(json_extract(s.value, '$[5]')), 0) FROM json_each(payload, '$.spans') s) AS discarded_tokens
FROM events WHERE kind = 'decision_committed'""",
    f"""CREATE VIEW spans AS
SELECT x.id, x.conversation, x.decision, x.event, x.position, x.message_id, x.path, x.start, x."end", x.tokens,
  json_extract(x.act, '$.do') AS action,
  CASE json_type(x.act, '$.reason')
    WHEN 'object' THEN {_note("json_extract(x.act, '$.reason.t')")}
    ELSE json_extract(x.act, '$.reason') END AS reason,
  {_exact("x.message_json")} AS exact,
  CASE
    WHEN x.path = '' THEN x.message_json
    WHEN {_exact("x.message_json")} THEN substr({_POINTED}, x.start + 1, x."end" - x.start)
  END AS text,
  CASE json_extract(x.act, '$.do')
    WHEN 'clamp' THEN printf('[%,d characters removed]', json_extract(x.act, '$.end') - json_extract(x.act, '$.start'))
    WHEN 'replace' THEN {_note("json_extract(x.act, '$.text.t')")}
    WHEN 'digest' THEN {_note(_SUMMARY)}
  END AS replaced_by,
  x.message_json
FROM (
  SELECT y.id, y.conversation, y.decision, y.event, y.position,
    json_extract(y.span, '$[0]') AS message_id,
    json_extract(y.span, '$[1]') AS path,
    json_extract(y.span, '$[2]') AS start,
    json_extract(y.span, '$[3]') AS "end",
    json_extract(y.span, '$[5]') AS tokens,
    json_extract(y.payload, '$.plan[' || json_extract(y.span, '$[4]') || ']') AS act,
    json_extract(y.span, '$[4]') AS act_index,
    y.payload,
    coalesce(t.body, b.body) AS message_json
  FROM (
    SELECT i.id, d.conversation, d.seq AS decision, i.decision AS event, i.position, d.payload,
      json_extract(d.payload, '$.spans[' || i.position || ']') AS span
    FROM span_ids i JOIN events d ON d.id = i.decision
  ) y
  LEFT JOIN events m ON m.kind = 'appended' AND json_extract(m.payload, '$.message') = json_extract(y.span, '$[0]')
  LEFT JOIN texts t ON t.digest = json_extract(m.payload, '$.text')
  LEFT JOIN bodies b ON b.id = t.shared
) x""",
    """CREATE VIEW usage AS
SELECT conversation, seq, at,
  json_extract(payload, '$.prompt_tokens') AS prompt_tokens,
  json_extract(payload, '$.completion_tokens') AS completion_tokens,
  json_extract(payload, '$.prefilled') AS prefilled,
  json_extract(payload, '$.reused') AS reused,
  json_extract(payload, '$.peak_tokens') AS peak_tokens,
  json_extract(payload, '$.kv_bytes') AS kv_bytes,
  json_extract(payload, '$.peak_kv_bytes') AS peak_kv_bytes,
  json_extract(payload, '$.ttft_ms') AS ttft_ms,
  json_extract(payload, '$.tpot_ms') AS tpot_ms,
  json_extract(payload, '$.why') AS why
FROM events WHERE kind = 'usage'""",
)
