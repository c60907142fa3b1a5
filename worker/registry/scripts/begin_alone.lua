-- The holder of a suspect has its worker to itself and begins: should it crash now, it is guilty. ARGV job id, unit, token.
if not held_under(ARGV[3], UNIT) then return 0 end
redis.call('HSET', UNIT, 'alone', 1)
return 1
