-- Units that are due for a look. Each is put off in the same breath, so that one worker alone acts on it.
-- KEYS open, served. ARGV key prefix, limit, grace ms, longest grace ms, ms after which a waiting unit is announced anyway,
-- ms after which a shard of a model that nobody serves is looked at again, the priority of a plan's message, ms of waiting
-- that are worth one step of priority, for each priority 0..9 the step of its lane (JSON), ms of silence after which the
-- holder of a lease that is over is gone, ms for which a worker says what it serves; then for each name of a model
-- that is served, and for '', the numbers of messages that wait for it, by priority (JSON).
-- Returns fours: member, what to do (announce|close), priority, model. Keys of jobs and units are derived from members.
local OPEN, SERVED, prefix = KEYS[1], KEYS[2], ARGV[1]
local limit, grace, longest, stale = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local unserved, plan_priority, ageing = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local steps, messages = cjson.decode(ARGV[9]), {}
local patience, ttl = tonumber(ARGV[10]), tonumber(ARGV[11])
for i = 12, #ARGV, 2 do messages[ARGV[i]] = cjson.decode(ARGV[i + 1]) end
local now = now_ms()
local out = {}

-- Lanes are strict: the lower step is taken first. A shard that was announced in none is behind them all.
local function step_of(priority)
  return steps[priority + 1] or math.huge
end

local function num_waiting(unit)
  return messages[unit.model][unit.lane + 1] or 0
end

local function act(member, what, priority, model)
  for _, word in ipairs({member, what, priority, model}) do out[#out + 1] = word end
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
  act(member, 'announce', unit.priority, unit.model)
end

-- What a unit's message would be sent with: its job's priority, raised one step for every `ageing` it has waited.
local function of_unit(key, name, held, base)
  local unit = {key = key, repeats = tonumber(held[3]), since = tonumber(held[4]), base = base, priority = base}
  unit.model = held[7] or ''
  if name == 'plan' then
    unit.step, unit.lane = 0, plan_priority
  else
    unit.first, unit.lane = tonumber(held[5] or held[4]), tonumber(held[6] or base)
    -- Redis' clock may have gone back since.
    unit.priority = math.max(0, base - math.floor(math.max(0, now - unit.first) / ageing))
    unit.step = step_of(unit.priority)
  end
  return unit
end

-- Whether a lease is over and it is known what became of its holder. It is alive if it has announced itself since: a worker
-- that hangs does not. It is gone if it was silent for `patience` of time in which others looked: a look counts for a
-- quarter at most, so that the time in which nobody could reach Redis does not. Else it is looked at again soon, and may
-- still renew its lease. The looks begin when half of the lease is over: as shipped, a dead holder's silence has lasted
-- long enough when its lease ends. `doubt` is that lease, and since when the holder is silent, when the last look was, how
-- much silence they saw.
local function judge(member, key, held, has_ended)
  local lease, judged, step = held[2], held[11], patience / 4
  if has_ended and is_judged(lease, judged) then return true end
  local of, began, last, silence = string.match(held[10] or '', '^(%S+) (%d+) (%d+) (%d+)$')
  if of ~= lease or tonumber(last) > now then began, last, silence = now, now, 0 end
  silence = silence + math.min(now - last, step)
  local ends = string.match(redis.call('HGET', SERVED, held[8]) or '', '^(%d+) ')
  local spoke = ends and ends - ttl
  local is_alive = spoke and spoke >= math.min(tonumber(lease), tonumber(began)) and spoke <= now
  if has_ended and is_alive then
    judged = lease .. ' alive'
  elseif has_ended and silence >= patience then
    judged = lease .. ' gone'
  else
    if is_alive then began, silence = now, 0 end
    redis.call('HSET', key, 'doubt', string.format('%s %.0f %.0f %.0f', lease, began, now, silence))
    redis.call('ZADD', OPEN, has_ended and now + step or math.min(now + step, tonumber(lease)), member)
    return false
  end
  redis.call('HSET', key, 'judged', judged)
  return true
end

-- What is due: also what is to be looked at later than anything can be, as it was put off before Redis' clock went back.
local due = redis.call('ZRANGEBYSCORE', OPEN, '-inf', now, 'LIMIT', 0, 10 * limit)
local latest = now + math.max(grace, longest, unserved)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', OPEN, latest, '+inf', 'LIMIT', 0, limit)) do due[#due + 1] = member end

-- Shards of models that nobody serves may be many and wait for days: they take no places of the others.
local num_looked = 0
for _, member in ipairs(due) do
  if num_looked == limit then break end
  num_looked = num_looked + 1
  local job_id, name = string.match(member, '^(.*)/(.*)$')
  local base = prefix .. 'j:' .. job_id
  local key = base .. ':s:' .. name
  local job = redis.call('HMGET', base .. ':job', 'st', 'cancel', 'deadline', 'pri')
  local held = redis.call('HMGET', key, 'st', 'lease', 'rp', 'since', 'first', 'lane', 'model', 'own', 'term', 'doubt', 'judged')
  if not held[1] or not is_open(job[1]) then
    redis.call('ZREM', OPEN, member)
  elseif held[1] == 'running' and not is_over(held[2], held[9], now) then
    local half = held[2] - (held[9] or 0) / 2
    if now < half then redis.call('ZADD', OPEN, half, member) else judge(member, key, held, false) end
    num_looked = num_looked - 1
  elseif job[2] ~= '0' or (job[3] ~= '0' and tonumber(job[3]) <= now) then
    redis.call('ZADD', OPEN, now + grace, member)
    act(member, 'close', job[4], '')
  elseif held[1] == 'running' and not judge(member, key, held, true) then
    num_looked = num_looked - 1
  elseif not messages[held[7] or ''] then
    local look = now + unserved
    if job[3] ~= '0' then look = math.min(look, tonumber(job[3])) end
    redis.call('ZADD', OPEN, look, member)
    num_looked = num_looked - 1
  else
    local unit = of_unit(key, name, held, tonumber(job[4]))
    -- Queued: announced if it has come up to a better lane, if nothing waits in its own, or if it waits there
    -- suspiciously long: then its message may be lost.
    if held[1] == 'running' or unit.step < step_of(unit.lane) or num_waiting(unit) == 0
      or now - unit.since > stale then
      announce(member, unit)
    else
      look_again(member, grace, unit)
    end
  end
end
return out
