-- Ask for a job's end. Its queued units are due at once; the owners of the others are told. ARGV job id.
local job = redis.call('HMGET', JOB, 'st', 'cancel', 'ns')
if not job[1] then return {'gone', 0} end
if not is_open(job[1]) then return {'terminal', 0} end
local now = now_ms()
if job[2] == '0' then redis.call('HSET', JOB, 'cancel', now) end
redis.call('ZADD', OPEN, 'XX', now, ARGV[1] .. '/plan')
-- No more than a job of its lines can have had, with parts of guilty ones: a producer may write any number there.
local num_shards = math.min(tonumber(job[3]), 3 * (redis.call('HLEN', IN) + redis.call('HLEN', RES)))
for number = 0, num_shards - 1 do
  redis.call('ZADD', OPEN, 'XX', now, ARGV[1] .. '/' .. number)
end
return {'open', num_shards}
