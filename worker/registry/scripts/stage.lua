-- Add lines to a job that is not accepted yet. KEYS job, where they wait (in, or a
-- submit's own). ARGV ttl ms, then index and line, alternating.
-- A job that was accepted keeps its lines: a second submit under its id must not touch them.
local state = redis.call('HGET', KEYS[1], 'st')
if state and state ~= 'refused' then return 0 end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
