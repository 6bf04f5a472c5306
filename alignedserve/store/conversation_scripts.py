"""Lua scripts for conversations (see scripts.py)."""

from __future__ import annotations

# A part with this many gaps is rewritten, and so is one that consists mostly of gaps. The store then writes the whole
# part to its disk.
MAX_GAPS = 64
# Seconds for which an addition's name is kept, to recognise a repetition.
NAMED_S = 600

# Functions that the scripts for responses share.
CONVERSATIONS = """
local function conversation(id) return key('conversation', id) end
local function field(id, name) return redis.call('HGET', conversation(id), name) end
local function count(id, name, more) redis.call('HINCRBY', conversation(id), name, more) end
local function items_of(id) return key('conversation-items', id, field(id, 'layout')) end
local function index_of(id) return key('conversation-index', id) end

local function conversation_size(id)
  return redis.call('HSTRLEN', conversation(id), 'state') + redis.call('STRLEN', items_of(id))
    + redis.call('STRLEN', index_of(id))
end

local function num_items_in(index) return select(2, string.gsub(index, '\\n', '')) end

local function is_overfull(id, num_items, num_bytes, max_items, max_bytes)
  local num_now = redis.call('STRLEN', items_of(id)) - field(id, 'num_gap_bytes')
  return field(id, 'num_items') + num_items > tonumber(max_items) or num_now + num_bytes > tonumber(max_bytes)
end

-- `items` is comma-separated JSON; `index` has a line per item, with the item's end
local function append(id, items, index, expires_at)
  redis.call('ZADD', key('expiring-conversations'), expires_at, id)
  if index == '' then return end
  local before, offset = conversation_size(id), redis.call('STRLEN', items_of(id))
  if offset > 0 then offset = redis.call('APPEND', items_of(id), ',') end
  redis.call('APPEND', items_of(id), items)
  local lines = string.gsub(index, '(%d+) ([^\\n]*\\n)', function(stop, name)
    return (offset + stop) .. ' ' .. name
  end)
  redis.call('APPEND', index_of(id), lines)
  count(id, 'num_items', num_items_in(index))
  charge(field(id, 'owner'), conversation_size(id) - before)
end
"""

ITEMS_IN = """
-- prefix, in place of a quotation mark, of a deleted item's id in the index
local GAP = '-'

-- returns the existing items: their ids, begins and ends
local function items_in(index)
  local names, begins, ends, begin = {}, {}, {}, 0
  for stop, name in string.gmatch(index, '(%d+) ([^\\n]*)\\n') do
    stop = tonumber(stop)
    if string.sub(name, 1, 1) ~= GAP then
      names[#names + 1], begins[#begins + 1], ends[#ends + 1] = name, begin, stop
    end
    begin = stop + 1
  end
  return names, begins, ends
end
"""

# Finds items by their ids, the arguments from `first` on. Returns per id where its first item begins and ends, or nil.
ITEMS = (
    ITEMS_IN
    + """
local function items_named(index, first)
  local names, begins, ends = items_in(index)
  local spans, found = {}, {}
  for at = #names, 1, -1 do spans[names[at]] = {begins[at], ends[at]} end
  for at = first, #ARGV do found[#found + 1] = spans[ARGV[at]] or false end
  return found
end
"""
)

# A page of items. Returns nothing if there is no such item. Otherwise returns '1' if there are more; the position after
# which the next page begins; and per item its id, begin and end.
# Several items may have the same id, since a reference has the id of its item. The next page's start then includes the
# item's place after a colon (also for an id that looks as if it had one). Clients that pass a page's plain last id
# continue after the last item with that id, so that they reach an end.
PAGE = (
    ITEMS_IN
    + """
-- `after`: '', or the item before the page: its id as JSON, perhaps with its place
local function page(index, after, limit, is_desc)
  local names, begins, ends = items_in(index)
  local counts = {}
  for _, name in ipairs(names) do counts[name] = (counts[name] or 0) + 1 end
  local first, last, step = 1, #names, 1
  if is_desc == '1' then first, last, step = #names, 1, -1 end
  if after ~= '' then
    local place = nil
    local name, number = string.match(after, '^(".*):(%d+)"$')
    if name and names[tonumber(number)] == name .. '"' then
      place = tonumber(number)
    else
      for at = first, last, step do
        if names[at] == after then place = at end
      end
    end
    if not place then return {} end
    first = place + step
  end
  local found, stop = {'0', ''}, first + step * (tonumber(limit) - 1)
  for at = first, last, step do
    if (at - stop) * step > 0 then
      found[1] = '1'
      break
    end
    found[2] = names[at]
    if counts[names[at]] > 1 or string.find(names[at], ':%d+"$') then
      found[2] = string.sub(names[at], 1, -2) .. ':' .. at .. '"'
    end
    for _, value in ipairs({names[at], begins[at], ends[at]}) do found[#found + 1] = value end
  end
  return found
end
"""
)

# New parts are passed as in response_scripts.py: name; '' or the name under which it is staged; bytes or size.
_NEW = """
local function size_of_new(at) return ARGV[at + 1] == '' and #ARGV[at + 2] or tonumber(ARGV[at + 2]) end

-- returns nil if the part is staged, but missing or incomplete
local function new_part(at)
  if ARGV[at + 1] == '' then return ARGV[at + 2] end
  local found = redis.call('GET', key('staged', ARGV[at + 1])) or ''
  return #found == tonumber(ARGV[at + 2]) and found or nil
end
"""

# Arguments: owner; size in bytes; limits of bytes. The answer is that of ADD.
ADMIT = "return full(ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]) or 1"

# Arguments: id; owner; creation time; state; expiry; limits of bytes; items; index.
ADD = (
    CONVERSATIONS
    + _NEW
    + """
local id, owner, created_at, state, expires_at, max_bytes, max_bytes_of_owner = unpack(ARGV)
if redis.call('EXISTS', conversation(id)) == 1 then return 1 end
local refused = full(owner, #state + size_of_new(8) + size_of_new(11), max_bytes, max_bytes_of_owner)
if refused then return refused end
local items, index = new_part(8), new_part(11)
if not items or not index then return -6 end
redis.call('HSET', conversation(id), 'owner', owner, 'created_at', created_at, 'state', state, 'layout', 0,
  'num_items', 0, 'num_gaps', 0, 'num_gap_bytes', 0)
charge(owner, #state)
append(id, items, index, expires_at)
return 1
"""
)

# Arguments: id; name of the addition; expiry; the most items; the most bytes of items; limits of bytes; and any number
# of pairs of items and index. The answer is 0 if the conversation does not exist.
APPEND = (
    CONVERSATIONS
    + _NEW
    + f"local NAMED_S = {NAMED_S}"
    + """
local id, name, expires_at, max_items, max_bytes, max_bytes_all, max_bytes_of_owner = unpack(ARGV)
if redis.call('EXISTS', conversation(id)) == 0 then return 0 end
if redis.call('EXISTS', key('appended', name)) == 1 then return 1 end
local new, num_items, num_bytes, size = {}, 0, 0, 0
for at = 8, #ARGV, 6 do
  local items, index = new_part(at), new_part(at + 3)
  if not items or not index then return -6 end
  new[#new + 1] = {items, index}
  num_items, num_bytes, size = num_items + num_items_in(index), num_bytes + #items, size + #items + #index
end
if num_items == 0 then return 1 end
if is_overfull(id, num_items, num_bytes, max_items, max_bytes) then return -7 end
local refused = full(field(id, 'owner'), size, max_bytes_all, max_bytes_of_owner)
if refused then return refused end
redis.call('SET', key('appended', name), 1, 'EX', NAMED_S)
for _, each in ipairs(new) do append(id, each[1], each[2], expires_at) end
return 1
"""
)

# Arguments: id. The answer is nil if the conversation does not exist. Otherwise: owner, creation time, state, layout,
# number of items, and the positions between which items are.
HEAD = (
    CONVERSATIONS
    + ITEMS_IN
    + """
local id = ARGV[1]
if redis.call('EXISTS', conversation(id)) == 0 then return false end
local found = redis.call('HMGET', conversation(id), 'owner', 'created_at', 'state', 'layout', 'num_items')
local size = redis.call('STRLEN', items_of(id))
if field(id, 'num_items') == '0' then return found end
if field(id, 'num_gaps') == '0' then
  found[6], found[7] = 0, size
  return found
end
local _, begins, ends = items_in(redis.call('GET', index_of(id)))
for at, begin in ipairs(begins) do
  if #found > 5 and found[#found] + 1 == begin then
    found[#found] = ends[at]
  else
    found[#found + 1], found[#found + 2] = begin, ends[at]
  end
end
return found
"""
)

# Arguments: id; layout; the rest as for a response's page. The answer is nil if the layout does not exist.
ITEM_PAGE = (
    CONVERSATIONS
    + PAGE
    + """
local id, layout, after, limit, is_desc = unpack(ARGV)
if field(id, 'layout') ~= layout then return false end
return page(redis.call('GET', index_of(id)) or '', after, limit, is_desc)
"""
)

# Arguments: id; layout; ids of items as JSON. The answer is nil if the layout does not exist.
NAMED_ITEMS = (
    CONVERSATIONS
    + ITEMS
    + """
if field(ARGV[1], 'layout') ~= ARGV[2] then return false end
return items_named(redis.call('GET', index_of(ARGV[1])) or '', 3)
"""
)

# Arguments: id; state; limits of bytes.
PUT_STATE = (
    CONVERSATIONS
    + """
local id, state, max_bytes, max_bytes_of_owner = unpack(ARGV)
if redis.call('EXISTS', conversation(id)) == 0 then return 0 end
local owner, more = field(id, 'owner'), #state - redis.call('HSTRLEN', conversation(id), 'state')
local refused = full(owner, more, max_bytes, max_bytes_of_owner)
if refused then return refused end
redis.call('HSET', conversation(id), 'state', state)
charge(owner, more)
return 1
"""
)

# Arguments: id; an item's id as JSON.
DELETE_ITEM = (
    CONVERSATIONS
    + ITEMS_IN
    + f"local MAX_GAPS = {MAX_GAPS}"
    + """
local id, wanted = unpack(ARGV)
local index = redis.call('GET', index_of(id))
if not index then return 0 end
local before = conversation_size(id)
local begin = 0
for stop, at, name in string.gmatch(index, '(%d+) ()([^\\n]*)\\n') do
  if name == wanted then
    redis.call('SETRANGE', index_of(id), at - 1, GAP)
    count(id, 'num_items', -1)
    count(id, 'num_gaps', 1)
    count(id, 'num_gap_bytes', stop + 1 - begin)
  end
  begin = stop + 1
end
local is_half_gaps = 2 * field(id, 'num_gap_bytes') > redis.call('STRLEN', items_of(id))
if is_half_gaps or tonumber(field(id, 'num_gaps')) >= MAX_GAPS then
  local names, begins, ends = items_in(redis.call('GET', index_of(id)))
  local items, texts, lines, stop = redis.call('GET', items_of(id)), {}, {}, -1
  for at = 1, #names do
    stop = stop + 1 + ends[at] - begins[at]
    texts[at], lines[at] = string.sub(items, begins[at] + 1, ends[at]), stop .. ' ' .. names[at] .. '\\n'
  end
  redis.call('UNLINK', items_of(id), index_of(id))
  count(id, 'layout', 1)
  redis.call('HSET', conversation(id), 'num_gaps', 0, 'num_gap_bytes', 0)
  if #names > 0 then
    redis.call('SET', items_of(id), table.concat(texts, ','))
    redis.call('SET', index_of(id), table.concat(lines))
  end
end
charge(field(id, 'owner'), conversation_size(id) - before)
return 1
"""
)

_DELETE = (
    CONVERSATIONS
    + """
local function delete(id)
  if redis.call('EXISTS', conversation(id)) == 1 then
    charge(field(id, 'owner'), -conversation_size(id))
    redis.call('UNLINK', items_of(id), index_of(id))
    redis.call('DEL', conversation(id))
  end
  redis.call('ZREM', key('expiring-conversations'), id)
end
"""
)

# Arguments: id.
DELETE = _DELETE + "delete(ARGV[1]) return 1"

# Arguments: now; the most to delete.
DROP_EXPIRED = (
    _DELETE
    + """
local due = redis.call('ZRANGEBYSCORE', key('expiring-conversations'), '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(due) do delete(id) end
return #due
"""
)
