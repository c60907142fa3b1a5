-- Put before every script about a unit (claim, put, renew, release, planned, cancel). KEYS are those of
-- Keys.of_unit_scripts. Two keys are known only from the job's own fields, the tenant's admission counters and the
-- idempotency key; they lie in the same hash slot.
local JOB, RES, ORD, IN, UNIT, PLAN, OPEN, ADM, DEAD =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function is_open(state)
  return state == 'queued' or state == 'running'
end

-- What to do with the prompts that have no record: run, cancelled or expired.
local function verdict(cancel, deadline, now)
  if cancel ~= '0' then return 'cancelled' end
  if deadline ~= '0' and tonumber(deadline) <= now then return 'expired' end
  return 'run'
end

-- Milliseconds to the deadline, -1 for none.
local function time_left(deadline, now)
  if deadline == '0' then return -1 end
  return math.max(tonumber(deadline) - now, 0)
end

-- When to look at a queued unit again: after the grace, but no later than the deadline.
local function next_look(now, grace, deadline)
  if deadline == '0' then return now + grace end
  return math.max(math.min(now + grace, tonumber(deadline)), now)
end

local function shard_key(number)
  return string.sub(PLAN, 1, -5) .. number
end

-- Not `-prompts`: minus nought is written "-0", which Redis does not take for a number.
local function give_back(counters, prompts, bytes, jobs)
  redis.call('HINCRBY', counters, 'prompts', 0 - prompts)
  redis.call('HINCRBY', counters, 'bytes', 0 - bytes)
  redis.call('HINCRBY', counters, 'jobs', 0 - jobs)
end

-- The job's last record is written: its end. Every shard's hash went with the shard's own last record.
local function finish(job_id, now)
  local job = redis.call('HMGET', JOB, 'cancel', 'exp', 'lost_plan', 'bytes', 'tenant', 'retain', 'idem')
  local state, reason = 'done', ''
  if job[1] ~= '0' then
    state = 'cancelled'
  elseif tonumber(job[2]) > 0 then
    state = 'expired'
  elseif job[3] == '1' then
    state, reason = 'failed', 'planning the job crashed one worker after another'
  end
  redis.call('HSET', JOB, 'st', state, 'reason', reason, 'fin', now)
  redis.call('ZREM', OPEN, job_id .. '/plan')
  redis.call('UNLINK', IN, PLAN)
  local tenant = ADM .. ':t:' .. job[5]
  give_back(ADM, 0, tonumber(job[4]), 1)
  give_back(tenant, 0, tonumber(job[4]), 1)
  if tonumber(redis.call('HGET', tenant, 'jobs')) <= 0 then redis.call('DEL', tenant) end
  for _, key in ipairs({JOB, RES, ORD}) do redis.call('PEXPIRE', key, job[6]) end
  if job[7] ~= '' then redis.call('PEXPIRE', job[7], job[6]) end
end
