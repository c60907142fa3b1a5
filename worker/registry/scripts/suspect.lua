-- Whether a unit is one to run alone: 1 if it is waiting to be run and crashed a worker before. No ARGV.
local held = redis.call('HMGET', UNIT, 'st', 'lease', 'att', 'judged')
if not held[1] then return 0 end
if held[1] == 'running' and not is_judged(held[2], held[4]) then return 0 end
if held[1] == 'running' and is_gone(held[2], held[4]) then return 1 end
return tonumber(held[3]) > 0 and 1 or 0
