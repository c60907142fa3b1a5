-- The holder of a suspect has its worker to itself and begins: should it crash now, it is guilty. ARGV job id, unit, token.
local held = redis.call('HMGET', UNIT, 'tok', 'st')
if held[1] ~= ARGV[3] or held[2] ~= 'running' then return 0 end
redis.call('HSET', UNIT, 'alone', 1)
return 1
