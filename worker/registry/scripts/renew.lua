-- Keep a unit for another lease. ARGV job id, unit, token, lease ms.
local held = redis.call('HMGET', UNIT, 'tok', 'st')
if held[1] ~= ARGV[3] or held[2] ~= 'running' then return {'fenced', '', 0} end
local job = redis.call('HMGET', JOB, 'cancel', 'deadline')
local now = now_ms()
local lease = now + tonumber(ARGV[4])
redis.call('HSET', UNIT, 'lease', lease)
redis.call('ZADD', OPEN, lease, ARGV[1] .. '/' .. ARGV[2])
return {'open', verdict(job[1], job[2], now), time_left(job[2], now)}
