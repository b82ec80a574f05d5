-- The columns of files and batches are named as the fields of OpenAI's objects where they are such
-- fields. Times are Unix seconds.

CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    -- caller_digest of the credential.
    owner BLOB NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    -- Of a result file, whose content is the results of this batch's lines; null: uploaded.
    batch_id TEXT,
    -- Whether it has the lines that succeeded, or the others.
    succeeded INTEGER
);
CREATE INDEX files_by_owner ON files (owner, seq);
CREATE INDEX files_by_expiry ON files (expires_at);
CREATE INDEX files_by_batch ON files (batch_id);

-- Content of uploaded files. Chunks without a file belong to an upload that was not finished.
CREATE TABLE chunks (
    file_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file_id, number)
);

CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner BLOB NOT NULL,
    -- What the lines are submitted with; null when the batch has ended.
    authorization TEXT,
    tenant TEXT,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT,
    model TEXT,
    status TEXT NOT NULL,
    errors TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    -- Seconds for which result files are kept.
    output_expires_s INTEGER NOT NULL,
    -- When the row may be deleted; null while the batch is open.
    delete_at INTEGER,
    -- Size of the lines while the batch is open: of the input file, then of results in its place.
    line_bytes INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX batches_by_owner ON batches (owner, seq);
CREATE INDEX open_batches ON batches (expires_at) WHERE delete_at IS NULL;
CREATE INDEX ended_batches ON batches (delete_at) WHERE delete_at IS NOT NULL;

CREATE TABLE lines (
    batch_id TEXT NOT NULL,
    -- Number of the line in the input file.
    number INTEGER NOT NULL,
    custom_id TEXT,
    -- The request; empty when the line has its result.
    body BLOB NOT NULL,
    -- The line of the result file or error file; null until the line is done.
    result BLOB,
    succeeded INTEGER,
    -- Number of the model among those of the file; some models share the last number.
    model_number INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (batch_id, number)
);
