-- Put before every script. These keys are set for scripts about a unit alone, those to which lua.py gives `_UNIT_KEYS`,
-- in this order: others must call nothing that names one. Keys that are known only from the job's own fields lie in the same
-- hash slot: the tenant's admission counters, its queued shards, the idempotency key.
local JOB, RES, ORD, IN, UNIT, PLAN, OPEN, ADM, DEAD, RESUME, QUEUED
-- A library's functions share these variables; Redis runs one at a time, to its end.
local function use_keys(KEYS)
  JOB, RES, ORD, IN, UNIT, PLAN, OPEN, ADM, DEAD, RESUME, QUEUED =
    KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
end
-- Behind every priority: of a shard that was announced in no lane.
local NO_LANE = 10

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function is_open(state)
  return state == 'queued' or state == 'running'
end

-- The fields of a unit that runs under the lease of this token, after its `tok` and `st`; nil if it does not. A lease
-- that ran out but that nobody took is still its holder's.
local function held_under(token, unit, ...)
  local held = redis.call('HMGET', unit, 'tok', 'st', ...)
  if held[1] == token and held[2] == 'running' then return held end
end

-- Whether a lease has run out, or ends later than one of its length can: then Redis' clock has gone back.
local function is_over(lease, term, now)
  return tonumber(lease) <= now or (term and tonumber(lease) > now + term)
end

-- Whether the reapers know what became of the holder of a lease that is over, and whether it is gone; see reap.
local function is_gone(lease, judged)
  return judged == lease .. ' gone'
end

local function is_judged(lease, judged)
  return is_gone(lease, judged) or judged == lease .. ' alive'
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

-- Shards that nobody holds, of each tenant and model, by `turn`; see choose. QUEUED@<model>: those tenants, the earliest
-- first; QUEUED@: those models. Suspects are not among them: each has its own message, and who chose one would send its
-- other shards away for it. `model` is nil of a shard that an older version planned: those are where that one looks.
local function of_queue(tenant, model)
  if model then return QUEUED .. ':' .. tenant .. '@' .. model, QUEUED .. '@' .. model end
  return QUEUED .. ':' .. tenant, QUEUED
end

local function enqueue(tenant, model, member, turn, now)
  local shards, tenants = of_queue(tenant, model)
  redis.call('ZADD', shards, turn, member)
  redis.call('ZADD', tenants, 'NX', now, tenant)
  if model then redis.call('ZADD', QUEUED .. '@', 'NX', now, model) end
end

local function dequeue(tenant, model, member)
  local shards, tenants = of_queue(tenant, model)
  if redis.call('ZREM', shards, member) == 0 or redis.call('EXISTS', shards) == 1 then return end
  redis.call('ZREM', tenants, tenant)
  if model and redis.call('EXISTS', tenants) == 0 then redis.call('ZREM', QUEUED .. '@', model) end
end

-- The job's shards of a model that are not done, by which its status tells what it waits for.
local function count_open(model, num_shards)
  if not model or num_shards == 0 then return end
  if redis.call('HINCRBY', JOB, 'm:' .. model, num_shards) <= 0 then redis.call('HDEL', JOB, 'm:' .. model) end
end

-- Let a unit wait for whoever claims it next, with `look` as its next look. Its message goes back to the lane it came
-- from, which may be an earlier one than it was announced in last.
local function requeue(member, now, look)
  local unit = redis.call('HMGET', UNIT, 'turn', 'att', 'model')
  local job = redis.call('HMGET', JOB, 'pri', 'tenant')
  redis.call('HSET', UNIT, 'st', 'queued', 'own', '', 'tok', '', 'lease', 0, 'since', now, 'alone', 0, 'lane', job[1])
  redis.call('ZADD', OPEN, look, member)
  if unit[1] and tonumber(unit[2]) == 0 then enqueue(job[2], unit[3] or nil, member, unit[1], now) end
end

-- Whether Redis has lost records that it had acknowledged to the unit's holder, who knows of `expected`: after a power cut
-- that took the last second of its file, or a failover to a replica that lagged. Whoever claims it next runs those.
local function is_rewound(member, expected, now)
  if tonumber(redis.call('HGET', UNIT, 'done')) >= tonumber(expected) then return false end
  requeue(member, now, now)
  return true
end

-- A new shard. `first`: when it, or the shard it was cut from, was first queued; `lane`: the priority it was last
-- announced with, see reap; `head`: what its first prompt begins with; `turn`: see choose; `model`: who may run it.
local function queue_shard(job_id, number, shard, now, look)
  redis.call('HSET', shard_key(number), 'st', 'queued', 'idx', shard.idx, 'n', shard.n, 'done', 0, 'own', '',
    'tok', '', 'lease', 0, 'fence', 0, 'att', shard.att, 'rp', 0, 'since', now, 'alone', 0, 'guilty', 0,
    'first', shard.first, 'lane', shard.lane, 'head', shard.head, 'turn', shard.turn)
  if shard.model then redis.call('HSET', shard_key(number), 'model', shard.model) end
  redis.call('ZADD', OPEN, look, job_id .. '/' .. number)
  if shard.att == 0 then enqueue(shard.tenant, shard.model, job_id .. '/' .. number, shard.turn, now) end
end

-- Of a guilty shard: 256 prompts come down to one in two crashes (256, 16), where halving would take eight. More parts
-- would crash less often and run more prompts in small company: a part runs alone.
local PARTS = 16

-- Replace a guilty shard by parts of what it lacks, all of them suspects and no more than that (one attempt each: most are
-- innocent, and a worker may also be killed from outside), due at once and announced in no lane yet. The shard counts as done, so that all of the job's shards are done in the end.
local function split(job_id, unit, missing, whole, now)
  local size = math.ceil(#missing / PARTS)
  local num_parts = math.ceil(#missing / size)
  local number = redis.call('HINCRBY', JOB, 'ns', num_parts) - num_parts
  for from = 1, #missing, size do
    local to = math.min(from + size - 1, #missing)
    local shard = {idx = table.concat(missing, ',', from, to), n = to - from + 1, att = 1, lane = NO_LANE}
    shard.first, shard.head, shard.turn = whole.first, whole.head, whole.turn
    shard.tenant, shard.model = whole.tenant, whole.model
    queue_shard(job_id, number, shard, now, now)
    number = number + 1
  end
  redis.call('UNLINK', UNIT)
  redis.call('ZREM', OPEN, job_id .. '/' .. unit)
  dequeue(whole.tenant, whole.model, job_id .. '/' .. unit)
  redis.call('HINCRBY', JOB, 'sd', 1)
  count_open(whole.model, num_parts - 1)
end

-- Let a tenant's list live as long as what is in it, once a job has ended that is kept until then: without an end while
-- others of the tenant are open, see submit; else until the last one is forgotten, which ADM:l: notes meanwhile.
local function keep_list(adm, tenant, kept_until, now)
  local noted, own = adm .. ':l:' .. tenant, adm .. ':j:' .. tenant
  local last = math.max(kept_until, tonumber(redis.call('GET', noted) or '0'))
  redis.call('SET', noted, string.format('%.0f', last), 'PX', math.max(last - now, 1))
  if tonumber(redis.call('HGET', adm .. ':t:' .. tenant, 'jobs') or '0') <= 0 then
    redis.call('PEXPIRE', own, math.max(last - now, 1))
  end
end

-- Put a job in the list of all and in `own`, that of its tenant, which no other tenant's jobs push out. With each that
-- comes two of the oldest go if they are forgotten, so that this holds about as many as there are.
local function list(all, own, job, job_id, now)
  for _, oldest in ipairs(redis.call('ZRANGE', own, 0, 1)) do
    local key = string.sub(job, 1, -5 - #job_id) .. oldest .. ':job'
    if redis.call('EXISTS', key) == 0 then redis.call('ZREM', own, oldest) end
  end
  for _, jobs in ipairs({all, own}) do
    redis.call('ZADD', jobs, now, job_id)
    redis.call('ZREMRANGEBYRANK', jobs, 0, -10001)
  end
end

-- What a tenant used of a model, by day, beyond the life of its results: records, and their tokens in, cached and out.
-- A day has at most so many tenants and models apart; further ones are counted together. It is forgotten after 400 days.
local MAX_USERS, USAGE_MS = 5000, 400 * 86400000

local function count_usage(adm, tenant, model, sums, now)
  local day = math.floor(now / 86400000)
  local key, user = adm .. ':u:' .. day, tenant .. '/' .. model
  if redis.call('HEXISTS', key, 'n/' .. user) == 0 then
    local num_users = redis.call('HLEN', key) / 4
    if num_users >= MAX_USERS then user = '/' end
    redis.call('HSETNX', key, 'n/' .. user, 0)
    redis.call('PEXPIRE', key, day * 86400000 + USAGE_MS - now)
  end
  for field, sum in pairs(sums) do redis.call('HINCRBY', key, field .. '/' .. user, sum) end
end

-- Not `-prompts`: minus zero is written "-0", which Redis does not take for a number.
local function give_back(counters, prompts, bytes, jobs)
  redis.call('HINCRBY', counters, 'prompts', 0 - prompts)
  redis.call('HINCRBY', counters, 'bytes', 0 - bytes)
  redis.call('HINCRBY', counters, 'jobs', 0 - jobs)
end

-- Remember how many bytes of records the job leaves behind, and until when: its tenant may be allowed so many. In its
-- counters while it is open, else summed in ADM:r:, from which submit takes the jobs of ADM:e: whose time has passed, and
-- delete its own. The two go with the last of these jobs.
local function retain_results(job_id, tenant, bytes, retain, now)
  if bytes == 0 then return end
  local sum, ends = ADM .. ':r:' .. tenant, ADM .. ':e:' .. tenant
  redis.call('HINCRBY', ADM .. ':t:' .. tenant, 'result_bytes', 0 - bytes)
  redis.call('HINCRBY', sum, 'bytes', bytes)
  redis.call('ZADD', ends, now + retain, job_id .. '/' .. bytes)
  local last = redis.call('ZREVRANGE', ends, 0, 0, 'WITHSCORES')[2]
  for _, key in ipairs({sum, ends}) do redis.call('PEXPIRE', key, last - now) end
end

local function waiting_callbacks(prefix, target)
  return prefix .. (string.sub(target, 1, 5) == 'task:' and 'cb:task' or 'cb:url')
end

-- Fails where the outbox cannot be had, as with an ACL file from before there was one. Called before the first write of
-- whatever may end a job: Redis takes back nothing that a script wrote, so it would have ended and nobody be told.
local function check_outbox(target)
  if target then redis.call('ZRANGE', waiting_callbacks(string.sub(OPEN, 1, -5), target), 0, 0) end
end

-- Of a callback that nobody takes, as nobody may send it. Each try, and each retry of an operator, begins this anew.
local CALLBACK_MS = 30 * 86400000

-- Let a callback wait until it is due.
local function queue_callback(waiting, id, entry, due)
  redis.call('ZADD', waiting, due, id)
  redis.call('PEXPIRE', entry, CALLBACK_MS)
  redis.call('PEXPIRE', waiting, CALLBACK_MS)
end

-- Put into the outbox that a job has ended. A job that ends again, because Redis went back, does so under the same id; one
-- that was refused and then accepted has another time of creation. `counts`: prompts, answered ones, failed ones. With each
-- that comes two of the oldest go if they are forgotten, as in a job's list.
local function put_callback(prefix, job_id, target, tenant, created, state, counts, now)
  local id = 'evt_' .. job_id .. '_' .. created
  local entry = prefix .. 'cb:e:' .. id
  redis.call('UNLINK', entry)
  redis.call('HSET', entry, 'job', job_id, 'to', target, 'tenant', tenant, 'state', state, 'at', now,
    'n', counts[1], 'ok', counts[2], 'err', counts[3], 'tries', 0, 'tok', '', 'error', '')
  redis.call('ZREM', prefix .. 'cb:dead', id)
  local waiting = waiting_callbacks(prefix, target)
  queue_callback(waiting, id, entry, now)
  for _, oldest in ipairs(redis.call('ZRANGE', waiting, 0, 1)) do
    if redis.call('EXISTS', prefix .. 'cb:e:' .. oldest) == 0 then redis.call('ZREM', waiting, oldest) end
  end
end

-- A job's end, with `prompts` of it that have no record. Its shards are gone by then, or there were none. The lines that
-- failed stay as long as their records; those of a job that was refused as a whole do not.
local function close(job_id, state, reason, prompts, now)
  local job = redis.call('HMGET', JOB, 'bytes', 'tenant', 'retain', 'idem', 'err', 'resb', 'cb',
    'created', 'n', 'ok')
  if job[7] then
    put_callback(string.sub(OPEN, 1, -5), job_id, job[7], job[2], job[8], state, {job[9], job[10], job[5]}, now)
  end
  redis.call('HSET', JOB, 'st', state, 'reason', reason, 'fin', now)
  redis.call('HINCRBY', ADM, 'end_' .. state, 1)
  redis.call('ZREM', OPEN, job_id .. '/plan')
  redis.call('UNLINK', PLAN, RESUME)
  if prompts == 0 and job[5] ~= '0' then redis.call('PEXPIRE', IN, job[3]) else redis.call('UNLINK', IN) end
  local tenant = ADM .. ':t:' .. job[2]
  give_back(ADM, prompts, tonumber(job[1]), 1)
  give_back(tenant, prompts, tonumber(job[1]), 1)
  retain_results(job_id, job[2], tonumber(job[6] or '0'), job[3], now)
  keep_list(ADM, job[2], now + job[3], now)
  if tonumber(redis.call('HGET', tenant, 'jobs')) <= 0 then redis.call('DEL', tenant) end
  for _, key in ipairs({JOB, RES, ORD}) do redis.call('PEXPIRE', key, job[3]) end
  if job[4] ~= '' then redis.call('PEXPIRE', job[4], job[3]) end
end

-- The job's last record is written. Every shard's hash went with the shard's own last record.
local function finish(job_id, now)
  local job = redis.call('HMGET', JOB, 'can', 'exp', 'lost_plan')
  local state, reason = 'done', ''
  -- By what became of its prompts: of a job whose last record came before its cancellation had any effect, nothing was.
  if tonumber(job[1] or '0') > 0 then
    state = 'cancelled'
  elseif tonumber(job[2]) > 0 then
    state = 'expired'
  elseif job[3] == '1' then
    state, reason = 'failed', 'planning the job crashed one worker after another'
  end
  close(job_id, state, reason, 0, now)
end
