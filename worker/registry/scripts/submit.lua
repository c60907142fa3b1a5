-- Accept a staged job. KEYS job, in, plan, open, adm, tenant's adm, jobs, where its lines are staged (in itself: by a
-- plain Celery producer), and idem where the producer gave a key.
-- ARGV[1]: JSON, see JobIntake.submit; with `only_known` no job is accepted that is not known.
local JOB, IN, PLAN, OPEN, ADM, TENANT, JOBS, STAGED, IDEM =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local a = cjson.decode(ARGV[1])
local now = now_ms()

local state = redis.call('HGET', JOB, 'st')
local is_known = state and state ~= 'refused'
-- Every answer but that the job is accepted. Lines that no unfinished job owns go by themselves; an accepted job's are kept
-- until its end, and those that failed as long as its records.
local function refuse(reply)
  if STAGED ~= IN or not is_known then
    redis.call('PEXPIRE', STAGED, a.staging_ms)
  elseif not is_open(state) then
    redis.call('PEXPIRE', IN, a.retain_ms)
  end
  return reply
end

-- The job that was accepted before, if it is the one that is asked for. One that an older version accepted is.
local function known(job_id, job_key, job_state)
  local job = redis.call('HMGET', job_key, 'digest', 'url', 'pin', 'strict')
  local other = {}
  if job[1] and job[1] ~= '' and a.digest ~= '' then
    if job[1] ~= a.digest then other[#other + 1] = 'lines' end
    if job[2] ~= a.endpoint then other[#other + 1] = 'endpoint' end
    if job[3] ~= a.model then other[#other + 1] = 'model' end
    if job[4] ~= tostring(a.strict) then other[#other + 1] = 'strict' end
  end
  if #other > 0 then return refuse({'reused', job_id, table.concat(other, ', ')}) end
  if STAGED ~= IN then redis.call('UNLINK', STAGED) end
  return refuse({'known', job_id, job_state})
end

if IDEM then
  local job_id = redis.call('GET', IDEM)
  -- Its hash lies in the same hash slot, named as this job's is.
  if job_id and job_id ~= a.job_id then
    return known(job_id, string.sub(JOB, 1, -5 - #a.job_id) .. job_id .. ':job', '')
  end
end
if is_known then return known(a.job_id, JOB, state) end
if a.only_known then return {'unknown'} end
if a.n > a.max_prompts then return refuse({'too_large', 'prompts', a.n, a.max_prompts}) end

local bytes, missing, first_missing = 0, 0, -1
-- No more steps than there are lines and one, whatever number a producer names.
local num_staged = redis.call('HLEN', STAGED)
for index = 0, math.min(a.n, num_staged + 1) - 1 do
  local length = redis.call('HSTRLEN', STAGED, index)
  if length == 0 then
    missing = missing + 1
    if first_missing < 0 then first_missing = index end
  end
  bytes = bytes + length
end
if missing > 0 then return refuse({'incomplete', math.min(num_staged, a.n - 1), first_missing}) end
if a.bytes >= 0 and bytes ~= a.bytes then return refuse({'changed', bytes, a.bytes}) end
if bytes > a.max_bytes then return refuse({'too_large', 'job_bytes', bytes, a.max_bytes}) end

-- Records of this tenant: of its open jobs, and of those that have ended and are not forgotten yet; see close.
local RESULTS, ENDS = ADM .. ':r:' .. a.tenant, ADM .. ':e:' .. a.tenant
local forgotten, forgotten_bytes = redis.call('ZRANGE', ENDS, '-inf', now, 'BYSCORE'), 0
for _, member in ipairs(forgotten) do forgotten_bytes = forgotten_bytes + string.match(member, '/(%d+)$') end

local function used_of(scope, resource)
  if scope == 'all' then return tonumber(redis.call('HGET', ADM, resource) or '0') end
  local used = tonumber(redis.call('HGET', TENANT, resource) or '0')
  if resource ~= 'result_bytes' then return used end
  return used + (redis.call('HGET', RESULTS, 'bytes') or '0') - forgotten_bytes
end

-- How many bytes a job's records will have nobody knows: it is refused once there is no room for one.
local asked = {prompts = a.n, bytes = bytes, jobs = 1, result_bytes = 1}
local counters = {all = ADM, tenant = TENANT}
for _, limit in ipairs(a.limits) do
  local used = used_of(limit.scope, limit.resource)
  if used + asked[limit.resource] > limit.most then
    local first = redis.call('ZRANGE', ENDS, '(' .. now, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    return refuse({'full', limit.scope, limit.resource, used, asked[limit.resource], limit.most,
      redis.call('HGET', ADM, 'rate') or '0', redis.call('HGET', counters[limit.scope], 'prompts') or '0',
      first[2] and math.floor(first[2] - now) or -1})
  end
end

local deadline = 0
if a.deadline_ms > 0 then deadline = now + a.deadline_ms end
-- The first write is one that a Redis without memory refuses: before anything has changed.
-- A worker that does not know version 2 must leave the job alone, as it would run the good lines of a bad file; one that
-- does not know version 3, as it would run them on its own model; and one that does not know 4, as it would tell nobody,
-- or refuse lines of /v1/responses.
redis.call('HSET', JOB, 'v', (a.on_done ~= '' or a.endpoint == '/v1/responses') and 4 or a.model ~= '' and 3 or (a.strict == 1 or a.endpoint ~= '') and 2 or 1,
  'st', 'queued', 'n', a.n, 'ok', 0, 'err', 0, 'exp', 0, 'bytes', bytes,
  'tenant', a.tenant, 'pri', a.priority, 'spec', a.spec, 'created', now, 'started', 0, 'deadline', deadline,
  'cancel', 0, 'fin', 0, 'reason', '', 'ns', 0, 'sd', 0, 'tokp', 0, 'tokc', 0, 'toko', 0,
  'retain', a.retain_ms, 'idem', IDEM or '', 'lost_plan', 0, 'strict', a.strict, 'url', a.endpoint,
  'trace', a.trace, 'pin', a.model, 'digest', a.digest)
-- What is left of a job that was refused under this id.
redis.call('HDEL', JOB, 'errors', 'cb')
if a.on_done ~= '' then redis.call('HSET', JOB, 'cb', a.on_done) end
redis.call('PERSIST', JOB)
redis.call('HSET', PLAN, 'st', 'queued', 'n', a.n, 'done', 0, 'idx', '', 'own', '', 'tok', '', 'lease', 0,
  'fence', 0, 'att', 0, 'rp', 0, 'since', now)
if STAGED ~= IN then redis.call('RENAME', STAGED, IN) end
redis.call('PERSIST', IN)
if #forgotten > 0 then
  for _, member in ipairs(forgotten) do redis.call('ZREM', ENDS, member) end
  redis.call('HINCRBY', RESULTS, 'bytes', 0 - forgotten_bytes)
end
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
list(JOBS, ADM .. ':j:' .. a.tenant, JOB, a.job_id, now)
redis.call('PEXPIRE', ADM .. ':j:' .. a.tenant, 732 * 86400000) -- the longest life of a job; its end shortens it
if IDEM then redis.call('SET', IDEM, a.job_id) end
return {'accepted', a.job_id}
