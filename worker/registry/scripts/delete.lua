-- Forget a job that has ended, with its records and lines. KEYS job, res, ord, in, jobs; the producer's own key for the
-- job lies in the same hash slot. ARGV job id. Returns the job's state before; nothing if there is no such job.
local JOB, JOBS = KEYS[1], KEYS[5]
local state, idem = unpack(redis.call('HMGET', JOB, 'st', 'idem'))
if not state or state == 'queued' or state == 'running' then return state end
redis.call('UNLINK', JOB, KEYS[2], KEYS[3], KEYS[4])
redis.call('ZREM', JOBS, ARGV[1])
if idem ~= '' and redis.call('GET', idem) == ARGV[1] then redis.call('UNLINK', idem) end
return state
