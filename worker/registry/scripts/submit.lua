-- Accept a staged job. KEYS job, in, plan, open, adm, tenant's adm, jobs, and idem where the producer gave a key.
-- ARGV[1]: JSON, see JobIntake.submit.
local JOB, IN, PLAN, OPEN, ADM, TENANT, JOBS, IDEM =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local a = cjson.decode(ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local state = redis.call('HGET', JOB, 'st')
local has_ended = state and state ~= 'queued' and state ~= 'running' and state ~= 'refused'
-- Lines that no unfinished job owns go by themselves, whatever the answer below; an accepted job's are kept until its
-- end, and those that failed as long as its records.
if has_ended then
  redis.call('PEXPIRE', IN, a.retain_ms)
elseif not state or state == 'refused' then
  redis.call('PEXPIRE', IN, a.staging_ms)
end
if IDEM then
  local known = redis.call('GET', IDEM)
  if known and known ~= a.job_id then return {'known', known, ''} end
end
if state and state ~= 'refused' then return {'known', a.job_id, state} end
if a.n > a.max_prompts then return {'too_large', 'prompts', a.n, a.max_prompts} end

local bytes, missing, first_missing = 0, 0, -1
for index = 0, a.n - 1 do
  local length = redis.call('HSTRLEN', IN, index)
  if length == 0 then
    missing = missing + 1
    if first_missing < 0 then first_missing = index end
  end
  bytes = bytes + length
end
if missing > 0 then return {'incomplete', a.n - missing, first_missing} end
if bytes > a.max_bytes then return {'too_large', 'job_bytes', bytes, a.max_bytes} end

local asked = {prompts = a.n, bytes = bytes, jobs = 1}
local counters = {all = ADM, tenant = TENANT}
for _, limit in ipairs(a.limits) do
  local used = tonumber(redis.call('HGET', counters[limit.scope], limit.resource) or '0')
  if used + asked[limit.resource] > limit.most then
    return {'full', limit.scope, limit.resource, used, asked[limit.resource], limit.most,
      redis.call('HGET', ADM, 'rate') or '0', redis.call('HGET', counters[limit.scope], 'prompts') or '0'}
  end
end

local deadline = 0
if a.deadline_ms > 0 then deadline = now + a.deadline_ms end
redis.call('DEL', JOB)
-- A worker that does not know version 2 must leave the job alone, as it would run the good lines of a bad file; and one
-- that does not know version 3, as it would run them on its own model.
redis.call('HSET', JOB, 'v', a.model ~= '' and 3 or (a.strict == 1 or a.endpoint ~= '') and 2 or 1,
  'st', 'queued', 'n', a.n, 'ok', 0, 'err', 0, 'exp', 0, 'bytes', bytes,
  'tenant', a.tenant, 'pri', a.priority, 'spec', a.spec, 'created', now, 'started', 0, 'deadline', deadline,
  'cancel', 0, 'fin', 0, 'reason', '', 'ns', 0, 'sd', 0, 'tokp', 0, 'tokc', 0, 'toko', 0,
  'retain', a.retain_ms, 'idem', IDEM or '', 'lost_plan', 0, 'strict', a.strict, 'url', a.endpoint,
  'trace', a.trace, 'pin', a.model)
redis.call('HSET', PLAN, 'st', 'queued', 'n', a.n, 'done', 0, 'idx', '', 'own', '', 'tok', '', 'lease', 0,
  'fence', 0, 'att', 0, 'rp', 0, 'since', now)
redis.call('PERSIST', IN)
for _, key in ipairs({ADM, TENANT}) do
  redis.call('HINCRBY', key, 'prompts', a.n)
  redis.call('HINCRBY', key, 'bytes', bytes)
  redis.call('HINCRBY', key, 'jobs', 1)
end
redis.call('HINCRBY', ADM, 'sub_jobs', 1)
redis.call('HINCRBY', ADM, 'sub_prompts', a.n)
local look = now + a.grace_ms
if deadline > 0 then look = math.min(look, deadline) end
redis.call('ZADD', OPEN, look, a.job_id .. '/plan')
redis.call('ZADD', JOBS, now, a.job_id)
redis.call('ZREMRANGEBYRANK', JOBS, 0, -10001)
if IDEM then redis.call('SET', IDEM, a.job_id) end
return {'accepted', a.job_id}
