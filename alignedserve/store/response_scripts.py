"""Lua scripts for responses (see scripts.py)."""

from __future__ import annotations

from alignedserve.store.conversation_scripts import CONVERSATIONS, ITEMS, PAGE
from alignedserve.store.redis_deliveries import DELIVER
from alignedserve.store.responses import PARTS

_PARTS = (
    "local PARTS = {"
    + ", ".join(f"'{name}'" for name in PARTS)
    + """}
local function head(id) return key('response-head', id) end
local function part(id, name) return key('response-part', id, name) end

local function size_stored(id)
  local size = redis.call('STRLEN', head(id))
  for _, name in ipairs(PARTS) do size = size + redis.call('STRLEN', part(id, name)) end
  return size
end

-- parts are arguments from `first` to `last`: each is its name; then '' and its bytes, or the name under which it is
-- staged and its size
local function size_given(first, last)
  local size = 0
  for at = first, last, 3 do
    size = size + (ARGV[at + 1] == '' and #ARGV[at + 2] or tonumber(ARGV[at + 2]))
  end
  return size
end

local function are_staged(first, last)
  for at = first, last, 3 do
    local name = ARGV[at + 1]
    if name ~= '' and redis.call('STRLEN', key('staged', name)) ~= tonumber(ARGV[at + 2]) then return false end
  end
  return true
end

local function put_parts(id, first, last)
  for at = first, last, 3 do
    if ARGV[at + 1] == '' then
      redis.call('SET', part(id, ARGV[at]), ARGV[at + 2])
    else
      redis.call('RENAME', key('staged', ARGV[at + 1]), part(id, ARGV[at]))
      redis.call('PERSIST', part(id, ARGV[at]))
    end
  end
end

local function close(id, owner)
  redis.call('ZREM', key('open', 'responses'), id)
  redis.call('ZREM', listed('unanswered', owner), id)
  if redis.call('ZCARD', listed('unanswered', owner)) == 0 then redis.call('ZREM', key('asking'), owner) end
  redis.call('DEL', key('falls', id))
  let_go(id)
end

-- limits from `first` on: open responses, in total and per owner; bytes, in total and per owner
local function refusal(owner, is_open, size, first)
  local max_open, max_open_of_owner, max_bytes, max_bytes_of_owner = unpack(ARGV, first, first + 3)
  local function is_reached(limit, listing)
    return is_open == '1' and limit ~= '' and redis.call('ZCARD', listing) >= tonumber(limit)
  end
  if is_reached(max_open_of_owner, listed('unanswered', owner)) then return -5 end
  if is_reached(max_open, key('open', 'responses')) then return -4 end
  return full(owner, size, max_bytes, max_bytes_of_owner)
end
"""
)

# For scripts after which a response may have ended. Its turn is six arguments from `first` on: the conversation or '';
# its expiry; the most items and the most bytes of a conversation; the output's index; and pairs of positions between
# which output is added.
_TURN = (
    CONVERSATIONS
    + """
local function has_turn(first)
  return ARGV[first] ~= '' and redis.call('EXISTS', conversation(ARGV[first])) == 1
end

local function spans_in(text) return string.gmatch(text, '(%d+) (%d+)') end

-- `input_index` is the index of the input items
local function is_turn_too_large(first, input_index, num_input_bytes)
  local id, _, max_items, max_bytes, output_index, spans = unpack(ARGV, first, first + 5)
  local num_bytes = num_input_bytes
  for begin, stop in spans_in(spans) do num_bytes = num_bytes + stop - begin end
  local num_items = num_items_in(input_index) + num_items_in(output_index)
  return is_overfull(id, num_items, num_bytes, max_items, max_bytes)
end

-- size in bytes of a turn with stored input
local function turn_size(first, response_id)
  local size = #ARGV[first + 4]
  for begin, stop in spans_in(ARGV[first + 5]) do size = size + stop - begin end
  for _, name in ipairs({'input_items', 'item_index'}) do
    size = size + redis.call('STRLEN', part(response_id, name))
  end
  return size
end

local function add_turn(first, response_id)
  local id, expires_at, _, _, output_index, spans = unpack(ARGV, first, first + 5)
  local function read(name) return redis.call('GET', part(response_id, name)) or '' end
  append(id, read('input_items'), read('item_index'), expires_at)
  local said = {}
  for begin, stop in spans_in(spans) do
    if stop - begin > 0 then said[#said + 1] = redis.call('GETRANGE', part(response_id, 'output'), begin, stop - 1) end
  end
  append(id, table.concat(said), output_index, expires_at)
end
"""
)

# Arguments: owner; '1' if it is open; size in bytes; limits. The answer is that of ADD.
ADMIT = (
    _PARTS
    + """
local owner, is_open, size = unpack(ARGV)
return refusal(owner, is_open, tonumber(size), 4) or 1
"""
)

# Arguments: head; id; owner; '1' if it is open; creation time; expiry; limits; its turn and the turn's size; parts.
ADD = (
    _PARTS
    + _TURN
    + """
local record, id, owner, is_open, created_at, expires_at = unpack(ARGV)
if redis.call('EXISTS', head(id)) == 1 then return 1 end
local size = #record + size_given(18, #ARGV) + ARGV[17]
local refused = refusal(owner, is_open, size, 7)
if refused then return refused end
if not are_staged(18, #ARGV) then return -6 end
if has_turn(11) then
  local at = {}
  for each = 18, #ARGV, 3 do at[ARGV[each]] = each end
  local items, index = at['input_items'], at['item_index']
  local input_index = ARGV[index + 1] == '' and ARGV[index + 2] or redis.call('GET', key('staged', ARGV[index + 1]))
  if is_turn_too_large(11, input_index, size_given(items, items)) then return -7 end
end
charge(owner, #record + size_given(18, #ARGV))
redis.call('SET', head(id), record)
put_parts(id, 18, #ARGV)
redis.call('ZADD', key('expiring-heads'), expires_at, id)
if is_open == '1' then
  redis.call('ZADD', key('open', 'responses'), created_at, id)
  redis.call('ZADD', listed('unanswered', owner), created_at, id)
  -- an owner without waiting responses goes before the others
  redis.call('ZADD', key('asking'), 'NX', 0, owner)
end
if has_turn(11) then add_turn(11, id) end
return 1
"""
)

# Arguments: token or ''; id; old head; new head; owner; '1' if it is over; limits of bytes, in total and per owner,
# which apply if there are parts; number of parts; its turn; the parts. Then per delivery: id, record, due time.
REPLACE = (
    _PARTS
    + _TURN
    + DELIVER
    + """
local token, id, old, new, owner, is_over, max_bytes, max_bytes_of_owner, num_parts = unpack(ARGV, 1, 9)
if token ~= '' and not is_held(id, token) then return -1 end
if redis.call('GET', head(id)) ~= old then return 0 end
local before, last = size_stored(id), 15 + 3 * tonumber(num_parts)
if num_parts ~= '0' then
  local num_freed = #old + (is_over == '1' and redis.call('STRLEN', part(id, 'call')) or 0)
  local more = #new + size_given(16, last) + (has_turn(10) and turn_size(10, id) or 0) - num_freed
  local refused = full(owner, more, max_bytes, max_bytes_of_owner)
  if refused then return refused end
end
if not are_staged(16, last) then return -6 end
if has_turn(10) then
  local input_index = redis.call('GET', part(id, 'item_index')) or ''
  if is_turn_too_large(10, input_index, redis.call('STRLEN', part(id, 'input_items'))) then return -7 end
end
redis.call('SET', head(id), new)
put_parts(id, 16, last)
if is_over == '1' then
  redis.call('UNLINK', part(id, 'call'))
  close(id, owner)
end
charge(owner, size_stored(id) - before)
if has_turn(10) then add_turn(10, id) end
deliver(last + 1)
return 1
"""
)

# Arguments: id, owner.
DELETE = (
    _PARTS
    + """
local id, owner = unpack(ARGV)
charge(owner, -size_stored(id))
redis.call('DEL', head(id))
for _, name in ipairs(PARTS) do redis.call('UNLINK', part(id, name)) end
redis.call('ZREM', key('expiring-heads'), id)
close(id, owner)
return 1
"""
)

# Arguments: token; milliseconds; the most to take; the most that this holder may have of one owner.
TAKE = """
local token, milliseconds, count, max_of_owner = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
-- a token ends with its holder's name
local function holder_of(given) return string.match(given, ':.*') end
local owners, free, room, found = redis.call('ZRANGE', key('asking'), 0, -1), {}, {}, {}
for _, owner in ipairs(owners) do
  -- if no keys are required, all responses have the same owner
  free[owner], room[owner] = {}, owner == '' and count or max_of_owner
  for _, id in ipairs(redis.call('ZRANGE', listed('unanswered', owner), 0, -1)) do
    local lease = redis.call('GET', key('lease', id))
    if not lease then
      table.insert(free[owner], id)
    elseif owner ~= '' and holder_of(lease) == holder_of(token) then
      room[owner] = room[owner] - 1
    end
  end
end
for turn = 1, count do
  for _, owner in ipairs(owners) do
    local id = free[owner][turn]
    if id and turn <= room[owner] and #found < count then
      redis.call('ZADD', key('asking'), redis.call('INCR', key('sequence')), owner)
      lease_to(token, milliseconds, id)
      found[#found + 1] = id
    end
  end
  if #found == count then break end
end
return found
"""

# Arguments: id; where the page begins: '' or the item before it, as JSON: its id, perhaps with its place; the most
# items; '1' for the last ones first. The answer is nil if the response does not exist, otherwise the page.
ITEM_PAGE = (
    _PARTS
    + PAGE
    + """
local id, after, limit, is_desc = unpack(ARGV)
local index = redis.call('GET', part(id, 'item_index'))
return index and page(index, after, limit, is_desc)
"""
)

# Arguments: id; ids of input items as JSON. The answer is nil if the response does not exist.
NAMED_ITEMS = (
    _PARTS
    + ITEMS
    + """
local index = redis.call('GET', part(ARGV[1], 'item_index'))
return index and items_named(index, 2)
"""
)

# Deletes a response of a store from before responses had parts. Argument: its id. Its record was a msgpack map that
# began with the id and the owner; an owner "" was omitted. (Redis's cmsgpack does not read it.)
DROP_OLD_RESPONSE = """
local id = ARGV[1]
local name = key('response', id)
local record = redis.call('GETRANGE', name, 0, 511)
-- returns a string and the position after it
local function text_at(at)
  local head, length = string.byte(record, at, at + 1)
  local first = at + 1
  if head == 217 then first = at + 2 else length = head - 160 end
  return string.sub(record, first, first + length - 1), first + length
end
if record ~= '' then
  local owner, _, rest = '', text_at(5)
  if string.sub(record, rest, rest + 5) == '\\165owner' then owner = text_at(rest + 6) end
  charge(owner, -redis.call('STRLEN', name))
  redis.call('ZREM', listed('responding', owner), id)
  redis.call('UNLINK', name)
  redis.call('DEL', key('falls', id))
  let_go(id)
end
redis.call('ZREM', key('open', 'responding'), id)
redis.call('ZREM', key('expiring-responses'), id)
return 1
"""
