-- Units that are due for a look. Each is put off in the same breath, so that one worker alone acts on it.
-- KEYS open. ARGV key prefix, limit, grace ms, longest grace ms, ms after which a waiting unit is announced anyway,
-- the priority of a plan's message, ms of waiting that are worth one step of priority, then for each priority 0..9 the
-- step of its lane, then for each the number of messages that wait there.
-- Returns triples: member, what to do (announce|close), priority. Keys of jobs and units are derived from the members.
local OPEN, prefix = KEYS[1], ARGV[1]
local limit, grace, longest, stale = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local plan_priority, ageing = tonumber(ARGV[6]), tonumber(ARGV[7])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local out = {}

-- Lanes are strict: the lower step is taken first. A shard that was announced in none is behind them all.
local function step_of(priority)
  return tonumber(ARGV[8 + priority]) or math.huge
end

local function num_waiting(priority)
  return tonumber(ARGV[18 + priority]) or 0
end

local function act(member, what, priority)
  out[#out + 1] = member
  out[#out + 1] = what
  out[#out + 1] = priority
end

-- Look again after `wait`, but no later than when a queued shard has waited for the next lane.
local function look_again(member, wait, unit)
  local look = now + wait
  if unit.step > 0 then look = math.min(look, math.max(now, unit.first + (unit.base - unit.step + 1) * ageing)) end
  redis.call('ZADD', OPEN, look, member)
end

local function announce(member, unit)
  redis.call('HSET', unit.key, 'rp', unit.repeats + 1, 'since', now, 'lane', unit.priority)
  look_again(member, math.min(grace * 2 ^ math.min(unit.repeats, 30), longest), unit)
  act(member, 'announce', unit.priority)
end

-- What a unit's message would be sent with: its job's priority, raised one step for every `ageing` it has waited.
local function of_unit(key, name, held, base)
  local unit = {key = key, repeats = tonumber(held[3]), since = tonumber(held[4]), base = base, priority = base}
  if name == 'plan' then
    unit.step, unit.lane = 0, plan_priority
  else
    unit.first, unit.lane = tonumber(held[5] or held[4]), tonumber(held[6] or base)
    unit.priority = math.max(0, base - math.floor((now - unit.first) / ageing))
    unit.step = step_of(unit.priority)
  end
  return unit
end

for _, member in ipairs(redis.call('ZRANGEBYSCORE', OPEN, '-inf', now, 'LIMIT', 0, limit)) do
  local job_id, name = string.match(member, '^(.*)/(.*)$')
  local base = prefix .. 'j:' .. job_id
  local key = base .. ':s:' .. name
  local job = redis.call('HMGET', base .. ':job', 'st', 'cancel', 'deadline', 'pri')
  local held = redis.call('HMGET', key, 'st', 'lease', 'rp', 'since', 'first', 'lane')
  if not held[1] or (job[1] ~= 'queued' and job[1] ~= 'running') then
    redis.call('ZREM', OPEN, member)
  elseif held[1] == 'running' and tonumber(held[2]) > now then
    redis.call('ZADD', OPEN, held[2], member)
  elseif job[2] ~= '0' or (job[3] ~= '0' and tonumber(job[3]) <= now) then
    redis.call('ZADD', OPEN, now + grace, member)
    act(member, 'close', job[4])
  else
    local unit = of_unit(key, name, held, tonumber(job[4]))
    -- Queued: announced if it has come up to a better lane, if nothing waits in its own, or if it waits there
    -- suspiciously long: then its message may be lost.
    if held[1] == 'running' or unit.step < step_of(unit.lane) or num_waiting(unit.lane) == 0
      or now - unit.since > stale then
      announce(member, unit)
    else
      look_again(member, grace, unit)
    end
  end
end
return out
