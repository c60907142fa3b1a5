-- Give a unit back unfinished. ARGV job id, unit, token, grace ms, 1 if it counts as an attempt.
local held = held_under(ARGV[3], UNIT, 'alone', 'turn', 'att', 'model')
if not held then return 0 end
local now = now_ms()
local job = redis.call('HMGET', JOB, 'cancel', 'deadline', 'pri', 'tenant')
-- Its message goes back to the lane it came from, which may be an earlier one than it was announced in last.
redis.call('HSET', UNIT, 'st', 'queued', 'own', '', 'tok', '', 'lease', 0, 'since', now, 'alone', 0, 'lane', job[3])
if ARGV[5] == '1' then
  redis.call('HINCRBY', UNIT, 'att', 1)
  -- As in claim: who failed alone is guilty.
  if held[3] == '1' then redis.call('HSET', UNIT, 'guilty', 1) end
end
local look = next_look(now, tonumber(ARGV[4]), job[2])
if job[1] ~= '0' then look = now end
redis.call('ZADD', OPEN, look, ARGV[1] .. '/' .. ARGV[2])
local is_suspect = tonumber(held[5]) > 0 or ARGV[5] == '1'
if held[4] and not is_suspect then enqueue(job[4], held[6] or nil, ARGV[1] .. '/' .. ARGV[2], held[4], now) end
return 1
