-- artd's one database. STRICT tables, a CHECK per state machine, times in integer milliseconds since the epoch.
-- Only the daemon's writer thread writes; every other connection is mode=ro.

CREATE TABLE origin (                        -- first, so that its page never moves: read without SQLite (artd.store.origin)
  id INTEGER PRIMARY KEY CHECK (id = 1),
  token TEXT NOT NULL                        -- 32 hexadecimal digits, in place
) STRICT;

CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;  -- instance, place, boot, clean, created, disk, retention, …

CREATE TABLE run (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 96),  -- a client's has up to 64; ".": deleted
  spec BLOB NOT NULL,                        -- JSON RunSpec: as the run was made
  learning BLOB,                             -- JSON Learning, once an operator has changed it
  base_digest TEXT NOT NULL,
  base_manifest BLOB NOT NULL,               -- JSON [{name, bytes, sha256, mtime_ns, inode}]
  vocab_size INTEGER NOT NULL,
  routes BLOB NOT NULL DEFAULT x'',          -- JSON RouteShape: mixture of experts with expert replay; else empty
  state TEXT NOT NULL CHECK (state IN ('active', 'paused', 'finished')),
  reason TEXT NOT NULL DEFAULT '',
  checkpoint_id INTEGER REFERENCES checkpoint, -- the newest of its chain: commits move it on, a rollback back
  step INTEGER NOT NULL DEFAULT -1,          -- that checkpoint's step
  lineage INTEGER NOT NULL DEFAULT 0,        -- of the next step; every rollback opens the next one
  next_epoch INTEGER NOT NULL DEFAULT 0,     -- policy epochs are never used twice
  flush INTEGER NOT NULL DEFAULT 0 CHECK (flush IN (0, 1)),
  told INTEGER NOT NULL DEFAULT 0,           -- the newest trajectory whose evaluation a step's metrics have counted
  flush_to INTEGER NOT NULL DEFAULT 0,       -- groups up to this id are being sealed for a flush; 0: none are
  packing BLOB,                              -- JSON {step, error, tries, at} of a batch that cannot be packed now
  created INTEGER NOT NULL
) STRICT;
CREATE INDEX run_state ON run (state);       -- how many are unfinished at once is the rule of artd/core/fleet.py

CREATE TABLE pause (                         -- a run is paused exactly while it has a row here
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES run,
  cause TEXT NOT NULL,                       -- operator, job N, ...: whoever lifts a cause lifts no other
  reason TEXT NOT NULL,
  created INTEGER NOT NULL,
  UNIQUE (run_id, cause)
) STRICT;

CREATE TABLE request (                       -- requests that a client may repeat and that count once
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  at INTEGER NOT NULL
) STRICT;

CREATE TABLE trajectory_group (
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES run,
  name TEXT NOT NULL,
  split TEXT NOT NULL CHECK (split IN ('train', 'eval')),
  state TEXT NOT NULL CHECK (state IN ('open', 'sealed', 'packed', 'trained', 'discarded')),
  reason TEXT NOT NULL DEFAULT '',
  size INTEGER NOT NULL DEFAULT 0,
  told INTEGER NOT NULL DEFAULT 0 CHECK (told IN (0, 1)),  -- whether a step's metrics have counted it
  deadline INTEGER NOT NULL,
  created INTEGER NOT NULL,
  UNIQUE (run_id, name)
) STRICT;
CREATE INDEX group_run ON trajectory_group (run_id, state);  -- as the other *_run: pages in the order of ids (artd/pages.py)
CREATE INDEX group_untold ON trajectory_group (run_id, state) WHERE told = 0;
CREATE INDEX group_open ON trajectory_group (deadline) WHERE state = 'open';
CREATE INDEX group_sealed ON trajectory_group (run_id, id) WHERE state = 'sealed' AND split = 'train';

-- How many groups there are, and trajectories in them: `artctl status` counts nothing. Kept by the triggers below alone.
CREATE TABLE group_count (
  run_id INTEGER NOT NULL REFERENCES run,
  split TEXT NOT NULL,
  state TEXT NOT NULL,
  groups INTEGER NOT NULL,
  trajectories INTEGER NOT NULL,
  PRIMARY KEY (run_id, split, state)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER group_added AFTER INSERT ON trajectory_group BEGIN
  INSERT INTO group_count VALUES (NEW.run_id, NEW.split, NEW.state, 1, NEW.size)
    ON CONFLICT DO UPDATE SET groups = groups + 1, trajectories = trajectories + excluded.trajectories;
END;
CREATE TRIGGER group_changed AFTER UPDATE OF run_id, split, state, size ON trajectory_group BEGIN
  UPDATE group_count SET groups = groups - 1, trajectories = trajectories - OLD.size
    WHERE run_id = OLD.run_id AND split = OLD.split AND state = OLD.state;
  INSERT INTO group_count VALUES (NEW.run_id, NEW.split, NEW.state, 1, NEW.size)
    ON CONFLICT DO UPDATE SET groups = groups + 1, trajectories = trajectories + excluded.trajectories;
END;
CREATE TRIGGER group_removed AFTER DELETE ON trajectory_group BEGIN
  UPDATE group_count SET groups = groups - 1, trajectories = trajectories - OLD.size
    WHERE run_id = OLD.run_id AND split = OLD.split AND state = OLD.state;
END;

CREATE TABLE blob (
  sha TEXT PRIMARY KEY,
  bytes INTEGER NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('trajectory', 'batch', 'manifest', 'replay', 'exchange', 'metadata')),
  created INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE trajectory (
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES run,
  group_id INTEGER NOT NULL REFERENCES trajectory_group,
  key TEXT NOT NULL,
  content TEXT NOT NULL,                     -- sha256 of everything submitted: same key + other content is a Conflict
  digest TEXT NOT NULL,                      -- sha256 of the body
  reward REAL NOT NULL,
  split TEXT NOT NULL CHECK (split IN ('train', 'eval')),
  state TEXT NOT NULL CHECK (state IN ('queued', 'packed', 'trained', 'discarded')),
  reason TEXT NOT NULL DEFAULT '',
  payload TEXT NOT NULL DEFAULT 'kept' CHECK (payload IN ('kept', 'expired')),
  blob TEXT REFERENCES blob,                 -- the body's file; NULL: it is in trajectory_data, or expired
  tokens INTEGER NOT NULL,                   -- sampled tokens
  epoch_min INTEGER,                         -- oldest and newest policy epoch of its tokens, when known
  epoch_max INTEGER,
  batch_id INTEGER REFERENCES batch,
  created INTEGER NOT NULL,
  UNIQUE (run_id, key),
  CHECK (payload = 'kept' OR blob IS NULL),
  CHECK (state NOT IN ('packed', 'trained') OR batch_id IS NOT NULL),
  CHECK (split = 'train' OR state IN ('queued', 'discarded'))
) STRICT;
CREATE INDEX trajectory_run ON trajectory (run_id, state);
CREATE INDEX trajectory_group_id ON trajectory (group_id);
CREATE INDEX trajectory_eval ON trajectory (run_id, id) WHERE split = 'eval';
CREATE INDEX trajectory_batch ON trajectory (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX trajectory_blob ON trajectory (blob) WHERE blob IS NOT NULL;
CREATE INDEX trajectory_kept ON trajectory (created)
  WHERE payload = 'kept' AND (state IN ('trained', 'discarded') OR split = 'eval');

-- One row for each trajectory: what is large and never changes with its state, so that a state change writes no body again.
-- `artd check` holds that a kept body is here or in a file, and an expired one in neither (trajectory.payload).
CREATE TABLE trajectory_data (
  trajectory_id INTEGER PRIMARY KEY REFERENCES trajectory,
  metrics BLOB NOT NULL,                     -- JSON {metrics, metadata}
  metadata TEXT REFERENCES blob,             -- JSON of metadata over 64 KiB, until the body expires; `metrics` has null then
  body BLOB                                  -- msgpack list[Turn], up to 64 KiB; last: who reads metrics alone reads no body
) STRICT;
CREATE INDEX trajectory_metadata ON trajectory_data (metadata) WHERE metadata IS NOT NULL;

CREATE TABLE batch (
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES run,
  step INTEGER NOT NULL,                     -- the step that training on it makes
  state TEXT NOT NULL CHECK (state IN ('packed', 'trained', 'abandoned')),
  payload TEXT NOT NULL DEFAULT 'kept' CHECK (payload IN ('kept', 'expired')),
  tensors TEXT REFERENCES blob,
  manifest TEXT NOT NULL REFERENCES blob,    -- manifests stay for ever
  replay TEXT REFERENCES blob,               -- replay bundle and its manifest, for expert replay
  replay_manifest TEXT REFERENCES blob,
  covered INTEGER,                           -- of `tokens`: those whose routes the bundle holds
  trajectories INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  fill REAL NOT NULL,
  created INTEGER NOT NULL,
  CHECK ((replay_manifest IS NULL) = (covered IS NULL)),
  CHECK ((payload = 'expired') = (tensors IS NULL) AND (payload = 'kept' OR state <> 'packed')),
  CHECK (CASE payload WHEN 'kept' THEN (replay IS NULL) = (replay_manifest IS NULL) ELSE replay IS NULL END)
) STRICT;
CREATE INDEX batch_run ON batch (run_id, state);
CREATE UNIQUE INDEX batch_step ON batch (run_id, step) WHERE state = 'packed';
CREATE INDEX batch_tensors ON batch (tensors) WHERE tensors IS NOT NULL;
CREATE INDEX batch_manifest ON batch (manifest);
CREATE INDEX batch_replay ON batch (replay) WHERE replay IS NOT NULL;
CREATE INDEX batch_replay_manifest ON batch (replay_manifest) WHERE replay_manifest IS NOT NULL;

CREATE TABLE job (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL REFERENCES run,
  kind TEXT NOT NULL CHECK (kind IN ('init', 'train')),
  step INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  batch_id INTEGER REFERENCES batch,
  parent_id INTEGER REFERENCES checkpoint,
  state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'succeeded', 'quarantined', 'cancelled')),
  fence INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  deaths INTEGER NOT NULL DEFAULT 0,         -- times its worker died though nobody ordered it
  not_before INTEGER NOT NULL DEFAULT 0,
  worker TEXT,
  spawn INTEGER,
  cancel INTEGER NOT NULL DEFAULT 0 CHECK (cancel IN (0, 1)),    -- an operator ended it, or told it to stop
  discard INTEGER NOT NULL DEFAULT 0 CHECK (discard IN (0, 1)),  -- and its trajectories go with it
  learning BLOB,                             -- JSON Learning of a train job: what the run had when the batch was packed
  waiting TEXT NOT NULL DEFAULT '',          -- why a queued job that is due is not sent to its trainer
  error TEXT NOT NULL DEFAULT '',
  metrics BLOB NOT NULL DEFAULT x'7b7d',     -- JSON
  seconds BLOB NOT NULL DEFAULT x'7b7d',     -- JSON {phase: seconds}
  created INTEGER NOT NULL,
  started INTEGER,
  ended INTEGER,
  CHECK ((state = 'running') = (worker IS NOT NULL)),
  CHECK ((kind = 'train') = (batch_id IS NOT NULL)),
  CHECK ((state IN ('succeeded', 'cancelled')) = (ended IS NOT NULL)),
  CHECK (discard <= cancel)
) STRICT;
CREATE INDEX job_batch ON job (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX job_parent ON job (parent_id) WHERE parent_id IS NOT NULL;
CREATE UNIQUE INDEX job_worker ON job (worker) WHERE worker IS NOT NULL;  -- a trainer has one job
CREATE INDEX job_state ON job (state, run_id);  -- not partial: SQLite takes no IN (...) for a narrower condition

CREATE TABLE attempt (
  job_id INTEGER NOT NULL REFERENCES job,
  fence INTEGER NOT NULL,
  worker TEXT NOT NULL,
  spawn INTEGER NOT NULL,
  started INTEGER NOT NULL,
  ended INTEGER,
  outcome TEXT CHECK (outcome IN
    ('succeeded', 'transient', 'permanent', 'rejected', 'interrupted', 'died', 'cancelled')),
  error TEXT NOT NULL DEFAULT '',
  evidence TEXT NOT NULL DEFAULT '',         -- end of the worker's log at its death, or the failure's stack
  PRIMARY KEY (job_id, fence)
) STRICT, WITHOUT ROWID;
CREATE INDEX attempt_worker ON attempt (worker, job_id, fence);

CREATE TABLE checkpoint (
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES run,
  step INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  lineage INTEGER NOT NULL,
  parent_id INTEGER REFERENCES checkpoint,
  job_id INTEGER NOT NULL REFERENCES job,
  sha TEXT NOT NULL,                         -- sha256 of manifest.json
  dir TEXT NOT NULL,                         -- relative to the data folder
  bytes INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('committed', 'retired')),
  abandoned INTEGER NOT NULL DEFAULT 0 CHECK (abandoned IN (0, 1)),  -- a rollback left it: off its run's chain
  created INTEGER NOT NULL,
  UNIQUE (run_id, lineage, step),
  UNIQUE (run_id, epoch)
) STRICT;
CREATE UNIQUE INDEX checkpoint_chain ON checkpoint (run_id, step) WHERE abandoned = 0;
CREATE INDEX checkpoint_run ON checkpoint (run_id, state);
CREATE INDEX checkpoint_job ON checkpoint (job_id);
CREATE INDEX checkpoint_parent ON checkpoint (parent_id) WHERE parent_id IS NOT NULL;

CREATE TABLE push (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL REFERENCES run,
  engine TEXT NOT NULL,                      -- the worker
  checkpoint_id INTEGER NOT NULL REFERENCES checkpoint,
  mode TEXT NOT NULL CHECK (mode IN ('merged', 'lora')),
  source TEXT CHECK (source IN ('live', 'disk')),
  transfer TEXT CHECK (transfer IN ('gloo', 'stock', 'direct', 'nccl')),
  state TEXT NOT NULL CHECK (state IN ('prepared', 'sending', 'live', 'superseded', 'failed')),
  fence INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  not_before INTEGER NOT NULL DEFAULT 0,
  max_abs REAL,
  mean_abs REAL,
  seconds BLOB NOT NULL DEFAULT x'7b7d',
  error TEXT NOT NULL DEFAULT '',
  created INTEGER NOT NULL,
  started INTEGER,
  ended INTEGER
) STRICT;
CREATE UNIQUE INDEX push_live ON push (engine) WHERE state = 'live';
CREATE UNIQUE INDEX push_sending ON push (engine) WHERE state = 'sending';
CREATE INDEX push_run ON push (run_id, state);
CREATE INDEX push_state ON push (state, engine);
CREATE INDEX push_checkpoint ON push (checkpoint_id);

CREATE TABLE serving (
  id INTEGER PRIMARY KEY,
  engine TEXT NOT NULL,
  spawn INTEGER NOT NULL,
  run_id INTEGER NOT NULL REFERENCES run,
  checkpoint_id INTEGER NOT NULL REFERENCES checkpoint,
  name TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('live', 'draining', 'gone')),
  created INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX serving_live ON serving (engine, name) WHERE state <> 'gone';
CREATE INDEX serving_state ON serving (state, engine);
CREATE INDEX serving_spawn ON serving (spawn, engine);
CREATE INDEX serving_checkpoint ON serving (checkpoint_id);
CREATE INDEX serving_of ON serving (run_id, state);  -- live and draining are few

CREATE TABLE process (
  name TEXT PRIMARY KEY,                     -- gateway, trainer-RUN, engine-RUN-REPLICA (artd_schema/worker_names.py)
  kind TEXT NOT NULL CHECK (kind IN ('trainer', 'engine', 'gateway')),
  run_id INTEGER REFERENCES run,             -- NULL: the gateway, which serves every run
  replica INTEGER NOT NULL DEFAULT 0,
  state TEXT NOT NULL CHECK (state IN ('stopped', 'starting', 'ready', 'busy', 'draining', 'backoff', 'broken')),
  boot INTEGER NOT NULL,
  boot_id TEXT NOT NULL DEFAULT '',          -- the kernel's
  spawn INTEGER NOT NULL DEFAULT 0,          -- counts this worker's processes, over all boots
  pid INTEGER,
  ticks INTEGER,                             -- start time of pid, clock ticks since the machine's start
  session INTEGER,
  restarts INTEGER NOT NULL DEFAULT 0,
  error TEXT NOT NULL DEFAULT '',
  log TEXT NOT NULL DEFAULT '',
  address TEXT NOT NULL DEFAULT '',          -- engine: its Unix socket; gateway: its URL
  held INTEGER NOT NULL DEFAULT 0,           -- engine: fence of the newest push for which the gateway was asked to hold it
  since INTEGER NOT NULL,
  CHECK (name = CASE kind WHEN 'gateway' THEN 'gateway' WHEN 'trainer' THEN 'trainer-' || run_id
    ELSE 'engine-' || run_id || '-' || replica END),
  CHECK ((kind = 'gateway') = (run_id IS NULL) AND (kind = 'engine' OR replica = 0))
) STRICT, WITHOUT ROWID;
CREATE INDEX process_of ON process (run_id, kind);  -- a run has few
CREATE INDEX process_alive ON process (kind) WHERE state <> 'stopped';

CREATE TABLE rollout (                       -- requests under one name, submitted together (docs/adr/0006)
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES run,
  name TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'submitted', 'expired')),
  trajectory_id INTEGER REFERENCES trajectory,
  created INTEGER NOT NULL,
  touched INTEGER NOT NULL,                  -- when its last response came
  UNIQUE (run_id, name),
  CHECK ((state = 'submitted') = (trajectory_id IS NOT NULL))
) STRICT;
CREATE INDEX rollout_run ON rollout (run_id, state);
CREATE INDEX rollout_open ON rollout (touched) WHERE state = 'open';
CREATE INDEX rollout_trajectory ON rollout (trajectory_id) WHERE trajectory_id IS NOT NULL;

CREATE TABLE exchange (
  id INTEGER PRIMARY KEY,
  run_id INTEGER NOT NULL REFERENCES run,
  response_id TEXT NOT NULL,
  choice INTEGER NOT NULL,
  model TEXT NOT NULL,
  split TEXT NOT NULL CHECK (split IN ('train', 'eval')),
  turn BLOB,                                 -- msgpack Turn, up to 64 KiB
  blob TEXT REFERENCES blob,                 -- or in a file; neither once a trajectory's body holds it
  trajectory_id INTEGER REFERENCES trajectory,
  created INTEGER NOT NULL,
  rollout_id INTEGER REFERENCES rollout,
  place INTEGER NOT NULL DEFAULT 0,          -- order of its request: the gateway's spawn << 40 | a number
  request TEXT NOT NULL DEFAULT '',          -- sha256 of the request
  delivery TEXT NOT NULL DEFAULT '' CHECK (delivery IN ('', 'pending', 'delivered', 'lost', 'superseded')),
  UNIQUE (run_id, response_id, choice),
  CHECK ((turn IS NOT NULL) + (blob IS NOT NULL) = (trajectory_id IS NULL)),
  CHECK ((rollout_id IS NULL) = (delivery = '')),
  CHECK (delivery <> 'superseded' OR trajectory_id IS NULL)
) STRICT;
CREATE INDEX exchange_rollout ON exchange (rollout_id, place, choice) WHERE rollout_id IS NOT NULL;
CREATE INDEX exchange_trajectory ON exchange (trajectory_id) WHERE trajectory_id IS NOT NULL;
CREATE INDEX exchange_blob ON exchange (blob) WHERE blob IS NOT NULL;
CREATE INDEX exchange_unused ON exchange (created) WHERE trajectory_id IS NULL;

-- How much the ledger keeps for trajectories that may come: one row, kept by the triggers below alone.
CREATE TABLE exchange_count (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  unused INTEGER NOT NULL,
  bytes INTEGER NOT NULL
) STRICT;
INSERT INTO exchange_count VALUES (1, 0, 0);
CREATE TRIGGER exchange_added AFTER INSERT ON exchange WHEN NEW.trajectory_id IS NULL BEGIN
  UPDATE exchange_count SET unused = unused + 1,
    bytes = bytes + coalesce(length(NEW.turn), (SELECT bytes FROM blob WHERE sha = NEW.blob), 0);
END;
CREATE TRIGGER exchange_used AFTER UPDATE OF trajectory_id ON exchange
WHEN OLD.trajectory_id IS NULL AND NEW.trajectory_id IS NOT NULL BEGIN
  UPDATE exchange_count SET unused = unused - 1,
    bytes = bytes - coalesce(length(OLD.turn), (SELECT bytes FROM blob WHERE sha = OLD.blob), 0);
END;
CREATE TRIGGER exchange_removed AFTER DELETE ON exchange WHEN OLD.trajectory_id IS NULL BEGIN
  UPDATE exchange_count SET unused = unused - 1,
    bytes = bytes - coalesce(length(OLD.turn), (SELECT bytes FROM blob WHERE sha = OLD.blob), 0);
END;

CREATE TABLE metric (
  run_id INTEGER NOT NULL REFERENCES run,
  lineage INTEGER NOT NULL,
  step INTEGER NOT NULL,
  name TEXT NOT NULL,
  value REAL NOT NULL,
  PRIMARY KEY (run_id, lineage, step, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE event (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at INTEGER NOT NULL,
  run TEXT NOT NULL DEFAULT '',
  kind TEXT NOT NULL,                        -- entity.verb, for example step.committed
  ref TEXT NOT NULL DEFAULT '',
  data BLOB NOT NULL DEFAULT x'7b7d'         -- JSON
) STRICT;
CREATE INDEX event_run ON event (run, id);
