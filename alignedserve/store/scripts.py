"""Lua scripts: changes that Redis makes atomically.

A script begins with COMMON and computes the names of its keys. So this store can't be on a Redis cluster, which must be
given the keys.

Negative answers (RedisLeases.done):

- -1: the lease is lost
- -2: the store is full
- -3: the owner's share is full
- -4, -5: too many open jobs, in total or of the owner
- -6: staged bytes are missing or incomplete
- -7: a conversation would have too many items or bytes
"""

from __future__ import annotations

from alignedserve.store.base import PLACE_KEPT_S
from alignedserve.store.records import MESSAGE_BATCH

PREFIX = "alignedserve:"

COMMON = (
    f"local PREFIX, MESSAGE_BATCH, PLACE_KEPT_S = '{PREFIX}', '{MESSAGE_BATCH}', {PLACE_KEPT_S}"
    + """
local function key(...) return PREFIX .. table.concat({...}, ':') end

-- an owner's part of a listing or counter
local function listed(name, owner) return key(name .. '@' .. owner) end

-- a command on each of these listings and the owner's part of it
local function for_lists(command, names, owner, ...)
  for _, name in ipairs(names) do
    redis.call(command, key(name), ...)
    redis.call(command, listed(name, owner), ...)
  end
end

-- stored bytes, in total and per owner; those outside the store are counted apart
local function add_to(counter, owner, num_bytes)
  if num_bytes ~= 0 then
    redis.call('INCRBY', key(counter), num_bytes)
    redis.call('INCRBY', listed(counter, owner), num_bytes)
  end
end
local function charge(owner, num_bytes) add_to('bytes', owner, num_bytes) end
local function charge_apart(owner, num_bytes) add_to('bytes-apart', owner, num_bytes) end

-- limits are numbers as text; '' means no limit
local function is_above(counter, more, limit)
  return limit ~= '' and tonumber(redis.call('GET', counter) or '0') + more > tonumber(limit)
end

local function is_full(counter, owner, more, max_all, max_owner)
  if more <= 0 then return nil end
  if is_above(listed(counter, owner), more, max_owner) then return -3 end
  if is_above(key(counter), more, max_all) then return -2 end
end
local function full(owner, more, max_all, max_owner) return is_full('bytes', owner, more, max_all, max_owner) end

local function size_of(id)
  local size = 0
  for _, number in ipairs(redis.call('HKEYS', key('data', id))) do
    size = size + redis.call('HSTRLEN', key('data', id), number)
  end
  return size
end

local function size_apart(id) return tonumber(redis.call('HGET', key('apart'), id) or '0') end

-- num_apart is '' for content in chunks in this store
local function is_whole(id, num_chunks, num_apart)
  if num_apart ~= '' then return redis.call('HGET', key('apart'), id) == num_apart end
  return redis.call('HLEN', key('data', id)) == tonumber(num_chunks)
end

local function delete_content(id, owner)
  charge(owner, -size_of(id))
  charge_apart(owner, -size_apart(id))
  redis.call('UNLINK', key('data', id))
  redis.call('HDEL', key('apart'), id)
end

-- deletes the data of an uncommitted file
local function drop(id)
  if redis.call('EXISTS', key('file', id)) == 1 then return end
  local owner = redis.call('HGET', key('uploaders'), id)
  if owner then delete_content(id, owner) end
  -- an earlier version recorded no owners
  redis.call('UNLINK', key('data', id))
  redis.call('ZREM', key('uploads'), id)
  redis.call('HDEL', key('uploaders'), id)
end

-- expires_at is '' for a file that does not expire
local function commit(record, id, owner, purpose, expires_at)
  local file = key('file', id)
  charge(owner, #record - redis.call('STRLEN', file))
  redis.call('SET', file, record)
  redis.call('ZREM', key('uploads'), id)
  redis.call('HDEL', key('uploaders'), id)
  for_lists('ZADD', {'files', 'files:' .. purpose}, owner, 'NX', redis.call('INCR', key('sequence')), id)
  if expires_at ~= '' then redis.call('ZADD', key('expiring'), expires_at, id) end
end

-- gives a lease to a new holder; lines that the holder before it left running have crashed with it
local function lease_to(token, milliseconds, id)
  redis.call('SET', key('lease', id), token, 'PX', milliseconds)
  redis.call('SET', key('holder', id), token)
  for _, line in ipairs(redis.call('SMEMBERS', key('running', id))) do
    redis.call('HINCRBY', key('falls', id), line, 1)
  end
  redis.call('DEL', key('running', id))
end

-- whether this is the last holder: an expired lease counts until another holder takes it
local function is_held(id, token) return redis.call('GET', key('holder', id)) == token end

local function let_go(id) redis.call('DEL', key('holder', id), key('lease', id), key('running', id)) end

-- the names of the listings that contain a job until it is deleted
local function job_lists(id)
  return id:sub(1, #MESSAGE_BATCH) == MESSAGE_BATCH and {'jobs', 'jobs:messages'} or {'jobs'}
end

-- deletes an ended job; its position in the listings is remembered for a while
local function forget_job(id, owner)
  local score = redis.call('ZSCORE', key('jobs'), id)
  if score then redis.call('SET', key('place', id), score .. ' ' .. owner, 'EX', PLACE_KEPT_S) end
  charge(owner, -redis.call('STRLEN', key('job', id)))
  redis.call('DEL', key('job', id), key('tally', id))
  for_lists('ZREM', job_lists(id), owner, id)
end

local STATUSES = {'validating', 'in_progress', 'finalizing', 'cancelling'}

-- lists an open job by its status, and removes any other from these listings
local function place(id, status, expires_at)
  for _, each in ipairs(STATUSES) do
    if each == status then
      redis.call('ZADD', key('open', each), expires_at, id)
    else
      redis.call('ZREM', key('open', each), id)
    end
  end
end
"""
)

# Arguments: id; owner; number; data; expiry; limits of bytes.
PUT_CHUNK = """
local id, owner, number, data = unpack(ARGV)
local more = #data - redis.call('HSTRLEN', key('data', id), number)
local refused = full(owner, more, ARGV[6], ARGV[7])
if refused then return refused end
charge(owner, more)
redis.call('HSET', key('data', id), number, data)
redis.call('ZADD', key('uploads'), ARGV[5], id)
redis.call('HSET', key('uploaders'), id, owner)
return 1
"""

# Arguments: id; owner; total bytes; expiry; limits of bytes outside the store.
RESERVE = """
local id, owner, num_bytes = unpack(ARGV)
local more = tonumber(num_bytes) - size_apart(id)
local refused = is_full('bytes-apart', owner, more, ARGV[5], ARGV[6])
if refused then return refused end
charge_apart(owner, more)
redis.call('HSET', key('apart'), id, num_bytes)
redis.call('ZADD', key('uploads'), ARGV[4], id)
redis.call('HSET', key('uploaders'), id, owner)
return 1
"""

# Arguments: record; id; owner; purpose; expiry or ''; number of chunks; bytes outside the store or ''.
COMMIT_FILE = """
local record, id, owner, purpose = unpack(ARGV)
if not is_whole(id, ARGV[6], ARGV[7]) then return 0 end
commit(record, id, owner, purpose, ARGV[5])
return 1
"""

DROP_CHUNKS = "drop(ARGV[1]) return 1"

# Arguments: now; the most to delete.
DROP_LAPSED = """
local lapsed = redis.call('ZRANGEBYSCORE', key('uploads'), '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(lapsed) do drop(id) end
return #lapsed
"""

# Arguments: id, owner, purpose.
DELETE_FILE = """
local id, owner, purpose = unpack(ARGV)
if redis.call('SCARD', key('uses', id)) > 0 then return 'in_use' end
local size = redis.call('STRLEN', key('file', id))
if size == 0 then return 'absent' end
charge(owner, -size)
delete_content(id, owner)
for_lists('ZREM', {'files', 'files:' .. purpose}, owner, id)
redis.call('ZREM', key('expiring'), id)
redis.call('UNLINK', key('file', id))
return 'deleted'
"""

# Arguments: record; id; owner; uploaded input file or ''; expiry; limits: open jobs in total and per owner, bytes, kept
# jobs; status.
ADD_JOB = """
local record, id, owner, input = unpack(ARGV)
if redis.call('EXISTS', key('job', id)) == 1 then return 1 end
if input ~= '' and redis.call('EXISTS', key('file', input)) == 0 then return 0 end
if ARGV[7] ~= '' and redis.call('ZCARD', listed('open', owner)) >= tonumber(ARGV[7]) then return -5 end
if ARGV[6] ~= '' and redis.call('ZCARD', key('open')) >= tonumber(ARGV[6]) then return -4 end
local refused = full(owner, #record, ARGV[8], ARGV[9])
if refused then return refused end
charge(owner, #record)
redis.call('SET', key('job', id), record)
redis.call('DEL', key('place', id))
for_lists('ZADD', job_lists(id), owner, redis.call('INCR', key('sequence')), id)
for_lists('ZADD', {'open'}, owner, ARGV[5], id)
place(id, ARGV[11], ARGV[5])
if input ~= '' then redis.call('SADD', key('uses', input), id) end
-- a few per new job, so that one step never deletes many
local num_more = redis.call('ZCARD', listed('jobs', owner)) - tonumber(ARGV[10])
if num_more > 0 then
  for _, old in ipairs(redis.call('ZRANGE', listed('jobs', owner), 0, math.min(num_more, 8) - 1)) do
    if not redis.call('ZSCORE', key('open'), old) then forget_job(old, owner) end
  end
end
return 1
"""

# Arguments: id, owner.
DELETE_JOB = """
local id, owner = unpack(ARGV)
if redis.call('ZSCORE', key('open'), id) then return 0 end
forget_job(id, owner)
return 1
"""

# Arguments: token or ''; id; old job; new job; owner; status; '1' if it is over; expiry; input file; number of files.
# Then per file: record, id, owner, purpose, expiry or '', number of chunks, bytes outside the store or ''. Then per
# delivery: id, record, due time. It follows DELIVER (redis_deliveries.py).
REPLACE_JOB = """
local token, id, old, new, owner, status, is_over, expires_at, input = unpack(ARGV)
if token ~= '' and not is_held(id, token) then return -1 end
if redis.call('GET', key('job', id)) ~= old then return 0 end
local rest = 11 + 7 * tonumber(ARGV[10])
for first = 11, rest - 1, 7 do
  if not is_whole(ARGV[first + 1], ARGV[first + 5], ARGV[first + 6]) then return 0 end
end
charge(owner, #new - #old)
redis.call('SET', key('job', id), new)
place(id, status, expires_at)
if is_over == '1' then
  for_lists('ZREM', {'open'}, owner, id)
  charge(owner, -tonumber(redis.call('HGET', key('tally', id), 'num_result_bytes') or '0'))
  redis.call('HDEL', key('tally', id), 'num_result_bytes')
  redis.call('UNLINK', key('results', id), key('falls', id))
  redis.call('SREM', key('uses', input), id)
  let_go(id)
end
for first = 11, rest - 1, 7 do commit(unpack(ARGV, first, first + 4)) end
deliver(rest)
return 1
"""

# Arguments: token; milliseconds; the most to take; status; latest due time or 'inf'.
TAKE = """
local token, milliseconds, count, status, due_by = unpack(ARGV)
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('open', status), '-inf', due_by)) do
  if #found == tonumber(count) then break end
  if redis.call('EXISTS', key('lease', id)) == 0 then
    lease_to(token, milliseconds, id)
    found[#found + 1] = id
  end
end
return found
"""

# Arguments: milliseconds; per lease: id, token. The answer per lease is 0: lost, 1: held, 2: held and the job is being
# cancelled.
RENEW = """
local found = {}
for at = 2, #ARGV, 2 do
  local id, token = ARGV[at], ARGV[at + 1]
  local state = 0
  if is_held(id, token) then
    redis.call('SET', key('lease', id), token, 'PX', ARGV[1])
    state = redis.call('ZSCORE', key('open', 'cancelling'), id) and 2 or 1
  end
  found[#found + 1] = state
end
return found
"""

# Arguments: token, id.
RELEASE = "if is_held(ARGV[2], ARGV[1]) then let_go(ARGV[2]) end return 1"

# Arguments: token, job, lines.
BEGIN_LINES = """
if not is_held(ARGV[2], ARGV[1]) then return -1 end
redis.call('SADD', key('running', ARGV[2]), unpack(ARGV, 3))
return 1
"""

# Arguments: token; job; line; result; field of the tally; tokens of input, output and cached input; owner; limits of
# bytes; bytes of the line; another field of the tally or ''.
PUT_RESULT = """
local token, id, line, result, field = unpack(ARGV)
if not is_held(id, token) then return -1 end
if redis.call('HEXISTS', key('results', id), line) == 0 then
  local refused = full(ARGV[9], #result, ARGV[10], ARGV[11])
  if refused then return refused end
  charge(ARGV[9], #result)
  redis.call('HSET', key('results', id), line, result)
  local tally = key('tally', id)
  redis.call('HINCRBY', tally, field, 1)
  redis.call('HINCRBY', tally, 'num_input_tokens', ARGV[6])
  redis.call('HINCRBY', tally, 'num_output_tokens', ARGV[7])
  redis.call('HINCRBY', tally, 'num_cached_tokens', ARGV[8])
  redis.call('HINCRBY', tally, 'num_result_bytes', #result)
  redis.call('HINCRBY', tally, 'num_line_bytes', ARGV[12])
  if ARGV[13] ~= '' then redis.call('HINCRBY', tally, ARGV[13], 1) end
end
redis.call('SREM', key('running', id), line)
return 1
"""

# Arguments: job, first line, last line. The answer: the total number of completed lines, and the completed ones in
# range.
LINES_DONE = """
local found = {redis.call('HLEN', key('results', ARGV[1]))}
if found[1] == 0 then return found end
for line = tonumber(ARGV[2]), tonumber(ARGV[3]) do
  if redis.call('HEXISTS', key('results', ARGV[1]), line) == 1 then found[#found + 1] = line end
end
return found
"""

# Arguments: job, bytes, lines. The answer: the first line's result, and those after it while all fit in `bytes`.
RESULTS = """
local found, size = {}, 0
for at = 3, #ARGV do
  local result = redis.call('HGET', key('results', ARGV[1]), ARGV[at])
  size = size + (result and #result or 0)
  if #found > 0 and size > tonumber(ARGV[2]) then break end
  found[#found + 1] = result
end
return found
"""

# For a store from before there were owners. Arguments: id, '' as owner, purpose.
ADOPT_FILE = """
local id, owner, purpose = unpack(ARGV)
for _, name in ipairs({'files', 'files:' .. purpose}) do
  local score = redis.call('ZSCORE', key(name), id)
  if score and redis.call('ZADD', listed(name, owner), 'NX', score, id) == 1 and name == 'files' then
    charge(owner, redis.call('STRLEN', key('file', id)) + size_of(id))
  end
end
return 1
"""

# The same for jobs. Arguments: id; owner; status; '1' if it is over; expiry.
ADOPT_JOB = """
local id, owner, status, is_over, expires_at = unpack(ARGV)
local score = redis.call('ZSCORE', key('jobs'), id)
if not score or redis.call('ZADD', listed('jobs', owner), 'NX', score, id) == 0 then return 0 end
charge(owner, redis.call('STRLEN', key('job', id)))
if is_over == '0' then
  redis.call('ZADD', listed('open', owner), expires_at, id)
  place(id, status, expires_at)
end
return 1
"""
