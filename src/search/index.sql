-- The embedded index, version 1: the operator's documents, in passages. Times are Unix seconds.

CREATE TABLE documents (
    id     INTEGER PRIMARY KEY AUTOINCREMENT, -- of one that was removed, it is not given again
    path   TEXT    NOT NULL UNIQUE,           -- where the file was read, from the root on
    source TEXT    NOT NULL,                  -- the source as clients see it
    title  TEXT    NOT NULL,
    digest BLOB    NOT NULL,                  -- SHA-256 of the file
    size   INTEGER NOT NULL,                  -- of the file, in bytes
    added  INTEGER NOT NULL                   -- when its present content was
) STRICT;

CREATE TABLE passages (
    id       INTEGER PRIMARY KEY,
    document INTEGER NOT NULL REFERENCES documents (id),
    title    TEXT    NOT NULL,                -- the document's
    heading  TEXT    NOT NULL,                -- the one that it is under, or empty
    content  TEXT    NOT NULL
) STRICT;

CREATE INDEX passages_by_document ON passages (document);

-- The words of the passages. It keeps no text of its own, so each change of a passage updates it.
CREATE VIRTUAL TABLE words USING fts5 (
    title, heading, content,
    content = 'passages', content_rowid = 'id',
    tokenize = 'porter unicode61 remove_diacritics 2'
);

CREATE TRIGGER passage_added AFTER INSERT ON passages BEGIN
    INSERT INTO words (rowid, title, heading, content) VALUES (new.id, new.title, new.heading, new.content);
END;

CREATE TRIGGER passage_removed AFTER DELETE ON passages BEGIN
    INSERT INTO words (words, rowid, title, heading, content)
    VALUES ('delete', old.id, old.title, old.heading, old.content);
END;
