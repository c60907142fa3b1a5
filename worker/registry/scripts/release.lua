-- Give a unit back unfinished. ARGV job id, unit, token, grace ms, 1 if it counts as an attempt.
local held = held_under(ARGV[3], UNIT, 'alone')
if not held then return 0 end
local now = now_ms()
local job = redis.call('HMGET', JOB, 'cancel', 'deadline')
if ARGV[5] == '1' then
  redis.call('HINCRBY', UNIT, 'att', 1)
  -- As in claim: who failed alone is guilty.
  if held[3] == '1' then redis.call('HSET', UNIT, 'guilty', 1) end
end
local look = next_look(now, tonumber(ARGV[4]), job[2])
if job[1] ~= '0' then look = now end
requeue(ARGV[1] .. '/' .. ARGV[2], now, look)
return 1
