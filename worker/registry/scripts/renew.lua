-- Keep a unit for another lease. ARGV job id, unit, token, lease ms, records of it that its holder knows of.
if not held_under(ARGV[3], UNIT) then return {'fenced', '', 0} end
local job = redis.call('HMGET', JOB, 'cancel', 'deadline')
local now = now_ms()
if is_rewound(ARGV[1] .. '/' .. ARGV[2], ARGV[5], now) then return {'rewound', '', 0} end
local lease = now + tonumber(ARGV[4])
redis.call('HSET', UNIT, 'lease', lease, 'term', ARGV[4])
redis.call('ZADD', OPEN, lease - tonumber(ARGV[4]) / 2, ARGV[1] .. '/' .. ARGV[2]) -- see reap
return {'open', verdict(job[1], job[2], now), time_left(job[2], now)}
