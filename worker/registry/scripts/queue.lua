-- How much work waits, for whom and for how long; changes nothing. KEYS open, queued, adm, dead.
-- ARGV: what keys begin with, the most pairs of tenant and model that are told apart, the most shards to read.
-- Returns: units that are not finished, ms for which the first has been due, dead units, tenants with waiting shards,
-- fields of adm; then for each tenant and model told apart the two, the tenant's open prompts, for each priority of the
-- shards that were read the priority, their number and the ms since the oldest was first queued, and how many were not
-- read; then for each model how many shards all its other tenants have; callbacks that wait, and dead ones.
local OPEN, QUEUED, ADM, DEAD, prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local most_rows, unread_budget = tonumber(ARGV[2]), tonumber(ARGV[3])
local MOST_TENANTS = 200 -- of a model, looked at, those that have waited longest: bounds the script's time
local now = now_ms()

local sizes, tenants, num_tenants = {}, {}, 0
local function look(set, model, of_model)
  for i, tenant in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    if not tenants[tenant] then tenants[tenant], num_tenants = true, num_tenants + 1 end
    local member = tenant .. of_model
    local size = i <= MOST_TENANTS and redis.call('ZCARD', QUEUED .. ':' .. member) or 0
    if size > 0 then sizes[#sizes + 1] = {member = member, tenant = tenant, model = model, size = size} end
  end
end
for _, model in ipairs(redis.call('ZRANGE', QUEUED .. '@', 0, -1)) do look(QUEUED .. '@' .. model, model, '@' .. model) end
look(QUEUED, '', '')
table.sort(sizes, function(a, b) return a.size > b.size or (a.size == b.size and a.member < b.member) end)

-- The oldest of a priority comes first among those of that priority: `turn` is its time, moved by the priority.
local function read(member, most)
  local by_priority, order, priorities = {}, {}, {}
  for _, shard in ipairs(redis.call('ZRANGE', QUEUED .. ':' .. member, 0, most - 1)) do
    local job_id, number = string.match(shard, '^(.*)/(.*)$')
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

local others, order, rows = {}, {}, {}
local num_rows = math.min(#sizes, most_rows)
for i = num_rows + 1, #sizes do
  local model = sizes[i].model
  if not others[model] then others[model], order[#order + 1] = 0, model end
  others[model] = others[model] + sizes[i].size
end
for i, model in ipairs(order) do order[i] = {model, others[model]} end
-- From the smallest on, so that what these leave of the budget is the larger ones'.
for i = num_rows, 1, -1 do
  local found = sizes[i]
  local most = math.min(found.size, math.floor(unread_budget / i))
  unread_budget = unread_budget - most
  local prompts = redis.call('HGET', ADM .. ':t:' .. found.tenant, 'prompts') or '0'
  local by_priority = {}
  if most > 0 then by_priority = read(found.member, most) end
  rows[#rows + 1] = {found.tenant, found.model, prompts, by_priority, found.size - most}
end

local due = redis.call('ZRANGE', OPEN, 0, 0, 'WITHSCORES')[2]
local overdue = math.max(now - tonumber(due or now), 0)
local adm = redis.call('HMGET', ADM, 'jobs', 'prompts', 'bytes', 'sub_jobs', 'sub_prompts', 'total', 'frames',
  'end_done', 'end_failed', 'end_cancelled', 'end_expired', 'cb_sent')
local callbacks = redis.call('ZCARD', prefix .. 'cb:url') + redis.call('ZCARD', prefix .. 'cb:task')
return {redis.call('ZCARD', OPEN), overdue, redis.call('ZCARD', DEAD), num_tenants, adm, rows, order, callbacks,
  redis.call('ZCARD', prefix .. 'cb:dead')}
