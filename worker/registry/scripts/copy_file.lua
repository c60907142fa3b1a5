-- Stage the lines of an uploaded file for a job; the file stays. KEYS: its lines, where they are staged.
-- ARGV: ms to keep them there. Returns whether the file is there.
if redis.call('COPY', KEYS[1], KEYS[2]) == 0 then return 0 end
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
