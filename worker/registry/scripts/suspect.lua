-- Whether a unit is one to run alone: 1 if it is waiting to be run and crashed a worker before. No ARGV.
local held = redis.call('HMGET', UNIT, 'st', 'lease', 'att')
if not held[1] then return 0 end
if held[1] == 'running' then return tonumber(held[2]) <= now_ms() and 1 or 0 end
return tonumber(held[3]) > 0 and 1 or 0
