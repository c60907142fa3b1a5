-- Give a unit back unfinished. ARGV job id, unit, token, grace ms, 1 if it counts as an attempt.
local held = redis.call('HMGET', UNIT, 'tok', 'st')
if held[1] ~= ARGV[3] or held[2] ~= 'running' then return 0 end
local now = now_ms()
redis.call('HSET', UNIT, 'st', 'queued', 'own', '', 'tok', '', 'lease', 0, 'since', now)
if ARGV[5] == '1' then redis.call('HINCRBY', UNIT, 'att', 1) end
local job = redis.call('HMGET', JOB, 'cancel', 'deadline')
local look = next_look(now, tonumber(ARGV[4]), job[2])
if job[1] ~= '0' then look = now end
redis.call('ZADD', OPEN, look, ARGV[1] .. '/' .. ARGV[2])
return 1
