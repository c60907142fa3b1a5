-- Keep how far unfinished prompts have come. ARGV job id, unit, token, then index and resume state, alternating.
if not held_under(ARGV[3], UNIT) then return 0 end
if not is_open(redis.call('HGET', JOB, 'st')) then return 0 end
for i = 4, #ARGV, 2 do
  -- A record that was written meanwhile has made it worthless.
  if redis.call('HEXISTS', RES, ARGV[i]) == 0 then redis.call('HSET', RESUME, ARGV[i], ARGV[i + 1]) end
end
return 1
