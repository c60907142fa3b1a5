-- Forget lines that were staged and never accepted. KEYS job, in.
local state = redis.call('HGET', KEYS[1], 'st')
if state and state ~= 'refused' then return 0 end
return redis.call('UNLINK', KEYS[2])
