-- Have a job planned again whose plan and shards are gone though lines of it have no record: Redis lost what it had
-- acknowledged. ARGV job id. Returns 1 if it is to be planned.
local job = redis.call('HMGET', JOB, 'st', 'n', 'ns', 'sd')
if not job[1] or not is_open(job[1]) or redis.call('EXISTS', PLAN) == 1 then return 0 end
if tonumber(job[4]) < tonumber(job[3]) or redis.call('HLEN', RES) >= tonumber(job[2]) then return 0 end
local now = now_ms()
redis.call('HSET', JOB, 'st', 'queued', 'ns', 0, 'sd', 0)
redis.call('HSET', PLAN, 'st', 'queued', 'n', job[2], 'done', redis.call('HLEN', RES), 'idx', '', 'own', '', 'tok', '',
  'lease', 0, 'fence', 0, 'att', 0, 'rp', 0, 'since', now)
redis.call('ZADD', OPEN, now, ARGV[1] .. '/plan')
return 1
