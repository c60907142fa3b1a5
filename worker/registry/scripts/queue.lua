-- How much work waits, for whom and for how long; changes nothing. KEYS open, queued, adm, dead.
-- ARGV: what keys begin with, the most tenants that are told apart, the most shards to read.
-- Returns: units that are not finished, ms for which the first has been due, dead units, tenants with waiting shards,
-- fields of adm, then for each tenant told apart its name, its open prompts and, for each priority of its shards that
-- were read, the priority, their number and the ms since the oldest was first queued; then how many were not read: of
-- each of these tenants, and of all others.
local OPEN, QUEUED, ADM, DEAD, prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local most_tenants, unread_budget = tonumber(ARGV[2]), tonumber(ARGV[3])
local MOST_TENANTS = 200 -- looked at, those that have waited longest: bounds the script's time
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local sizes = {}
for _, tenant in ipairs(redis.call('ZRANGE', QUEUED, 0, MOST_TENANTS - 1)) do
  local size = redis.call('ZCARD', QUEUED .. ':' .. tenant)
  if size > 0 then sizes[#sizes + 1] = {tenant = tenant, size = size} end
end
table.sort(sizes, function(a, b) return a.size > b.size or (a.size == b.size and a.tenant < b.tenant) end)

-- The oldest of a priority comes first among those of that priority: `turn` is its time, moved by the priority.
local function read(tenant, most)
  local by_priority, order, priorities = {}, {}, {}
  for _, member in ipairs(redis.call('ZRANGE', QUEUED .. ':' .. tenant, 0, most - 1)) do
    local job_id, number = string.match(member, '^(.*)/(.*)$')
    local job = prefix .. 'j:' .. job_id
    local priority = priorities[job_id] or redis.call('HGET', job .. ':job', 'pri') or ''
    priorities[job_id] = priority
    local found = by_priority[priority]
    if not found then
      local first = tonumber(redis.call('HGET', job .. ':s:' .. number, 'first') or now)
      found = {priority, 0, math.max(now - first, 0)}
      by_priority[priority], order[#order + 1] = found, found
    end
    found[2] = found[2] + 1
  end
  return order
end

local others, rows = 0, {}
local num_rows = math.min(#sizes, most_tenants)
for i = num_rows + 1, #sizes do others = others + sizes[i].size end
-- From the smallest on, so that what these leave of the budget is the larger ones'.
for i = num_rows, 1, -1 do
  local tenant, size = sizes[i].tenant, sizes[i].size
  local most = math.min(size, math.floor(unread_budget / i))
  unread_budget = unread_budget - most
  local prompts = redis.call('HGET', ADM .. ':t:' .. tenant, 'prompts') or '0'
  local by_priority = {}
  if most > 0 then by_priority = read(tenant, most) end
  rows[#rows + 1] = {tenant, prompts, by_priority, size - most}
end

local due = redis.call('ZRANGE', OPEN, 0, 0, 'WITHSCORES')[2]
local overdue = math.max(now - tonumber(due or now), 0)
local adm = redis.call('HMGET', ADM, 'jobs', 'prompts', 'bytes', 'sub_jobs', 'sub_prompts', 'total', 'frames',
  'end_done', 'end_failed', 'end_cancelled', 'end_expired')
return {redis.call('ZCARD', OPEN), overdue, redis.call('ZCARD', DEAD), redis.call('ZCARD', QUEUED), adm, rows, others}
