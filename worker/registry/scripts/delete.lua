-- Forget a job that has ended, with its records and lines. KEYS job, res, ord, in, jobs, adm; the producer's own key for
-- the job and its tenant's counts of records lie in the same hash slot. ARGV job id. Returns the job's state before;
-- nothing if there is no such job.
local JOB, JOBS, ADM = KEYS[1], KEYS[5], KEYS[6]
local state, idem, tenant, bytes = unpack(redis.call('HMGET', JOB, 'st', 'idem', 'tenant', 'resb'))
if not state or state == 'queued' or state == 'running' then return state end
redis.call('UNLINK', JOB, KEYS[2], KEYS[3], KEYS[4])
redis.call('ZREM', JOBS, ARGV[1])
redis.call('ZREM', ADM .. ':j:' .. tenant, ARGV[1])
if bytes and redis.call('ZREM', ADM .. ':e:' .. tenant, ARGV[1] .. '/' .. bytes) == 1 then
  redis.call('HINCRBY', ADM .. ':r:' .. tenant, 'bytes', 0 - bytes)
end
if idem ~= '' and redis.call('GET', idem) == ARGV[1] then redis.call('UNLINK', idem) end
return state
