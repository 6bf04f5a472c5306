"""Steps that Redis takes whole or not at all.

A lease that has to be held is KEYS[1] and ARGV[1]; an empty token asks for none. A lease lost is the answer -1.
"""

from __future__ import annotations

_HELD = """
if ARGV[1] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
"""

# lease key, job's token; milliseconds
RENEW = _HELD + "return redis.call('PEXPIRE', KEYS[1], ARGV[2])"

RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"

# lease, results, tally; line, result, field of the tally; tokens of input, output, input that was cached
PUT_RESULT = (
    _HELD
    + """
if redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3]) == 1 then
  redis.call('HINCRBY', KEYS[3], ARGV[4], 1)
  redis.call('HINCRBY', KEYS[3], 'num_input_tokens', ARGV[5])
  redis.call('HINCRBY', KEYS[3], 'num_output_tokens', ARGV[6])
  redis.call('HINCRBY', KEYS[3], 'num_cached_tokens', ARGV[7])
end
return 1
"""
)

# lease, job, open jobs, results, uses of the input, and per file: file, data, listing, listing of its purpose;
# old job, new job, job id, '1' if that is over, score of the listings, and per file: record, id
REPLACE_JOB = (
    _HELD
    + """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[2], ARGV[3])
if ARGV[5] == '1' then
  redis.call('ZREM', KEYS[3], ARGV[4])
  redis.call('UNLINK', KEYS[4])
  redis.call('SREM', KEYS[5], ARGV[4])
  redis.call('DEL', KEYS[1])
end
for i = 0, (#KEYS - 5) / 4 - 1 do
  local file, data, all, some = KEYS[6 + 4 * i], KEYS[7 + 4 * i], KEYS[8 + 4 * i], KEYS[9 + 4 * i]
  redis.call('SET', file, ARGV[7 + 2 * i])
  redis.call('PERSIST', data)
  redis.call('ZADD', all, ARGV[6] + i, ARGV[8 + 2 * i])
  redis.call('ZADD', some, ARGV[6] + i, ARGV[8 + 2 * i])
end
return 1
"""
)

# file, data, listing, listing of its purpose, those that expire; record, id, score, chunks, when it expires or ''
COMMIT_FILE = """
if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[4]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('PERSIST', KEYS[2])
if ARGV[5] ~= '' then redis.call('ZADD', KEYS[5], ARGV[5], ARGV[2]) end
redis.call('ZADD', KEYS[3], 'NX', ARGV[3], ARGV[2])
redis.call('ZADD', KEYS[4], 'NX', ARGV[3], ARGV[2])
return 1
"""

# file, data
DROP_CHUNKS = "if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('UNLINK', KEYS[2]) end return 1"

# file, data, uses, listings; id
DELETE_FILE = """
if redis.call('SCARD', KEYS[3]) > 0 then return 'in_use' end
for i = 4, #KEYS do redis.call('ZREM', KEYS[i], ARGV[1]) end
redis.call('UNLINK', KEYS[2])
if redis.call('DEL', KEYS[1]) == 0 then return 'absent' end
return 'deleted'
"""

# job, jobs, open jobs, input file, uses of it; record, id, score, when it expires
ADD_JOB = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
if redis.call('EXISTS', KEYS[4]) == 0 then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], 'NX', ARGV[3], ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[2])
redis.call('SADD', KEYS[5], ARGV[2])
return 1
"""
