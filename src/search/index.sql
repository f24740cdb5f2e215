-- The index of a folder, version 2. It is built once, and never changes after that.

CREATE TABLE folder (
    path        BLOB    NOT NULL,
    fingerprint BLOB    NOT NULL, -- a hash over the paths, sizes and times of all files, as they were
    passages    INTEGER NOT NULL  -- the number of all passages
) STRICT;

CREATE VIRTUAL TABLE passages USING fts5 (
    title, heading, content,      -- the document's title, the heading that the text is under, or empty
    source UNINDEXED,             -- the document's path below the folder
    tokenize = 'unicode61 remove_diacritics 2'
);
