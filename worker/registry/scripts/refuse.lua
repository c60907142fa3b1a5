-- Remember that a job was refused, where its producer is not there to be told. KEYS job, jobs, where its lines wait, adm.
-- ARGV job id, reason, errors (JSON), tenant, ms to remember it, ms to keep its lines, whom to tell (or empty).
local state = redis.call('HGET', KEYS[1], 'st')
local before = redis.call('HMGET', KEYS[1], 'reason', 'errors')
if state and state ~= 'refused' then
  -- The accepted job keeps its lines; those of this submit alone go, as it staged them without an end.
  if KEYS[3] ~= string.sub(KEYS[1], 1, -4) .. 'in' then redis.call('PEXPIRE', KEYS[3], ARGV[6]) end
  return 0
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'v', 1, 'st', 'refused', 'n', 0, 'ok', 0, 'err', 0, 'exp', 0, 'bytes', 0,
  'tenant', ARGV[4], 'pri', 0, 'spec', '{}', 'created', now, 'started', 0, 'deadline', 0, 'cancel', 0, 'fin', now,
  'reason', ARGV[2], 'errors', ARGV[3], 'ns', 0, 'sd', 0, 'tokp', 0, 'tokc', 0, 'toko', 0, 'retain', ARGV[5], 'idem', '', 'lost_plan', 0)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
-- A plain Celery producer stages them without an end.
redis.call('PEXPIRE', KEYS[3], ARGV[6])
list(KEYS[2], KEYS[4] .. ':j:' .. ARGV[4], KEYS[1], ARGV[1], now)
keep_list(KEYS[4], ARGV[4], now + ARGV[5], now)
-- Not again when its message comes twice.
if ARGV[7] ~= '' and not (before[1] == ARGV[2] and before[2] == ARGV[3]) then
  put_callback(string.sub(KEYS[2], 1, -5), ARGV[1], ARGV[7], ARGV[4], now, 'failed', {0, 0, 0}, now)
end
return 1
