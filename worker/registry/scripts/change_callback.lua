-- Have a callback sent now, with all of its tries, or forget it. KEYS waiting ones of URLs, of tasks, dead ones. ARGV what
-- keys begin with, id, retry or drop. Returns 0 if there is none of this id.
local entry, id, now = ARGV[1] .. 'cb:e:' .. ARGV[2], ARGV[2], now_ms()
local target = redis.call('HGET', entry, 'to')
if not target then return 0 end
if ARGV[3] == 'drop' then
  redis.call('UNLINK', entry)
  for i = 1, 3 do redis.call('ZREM', KEYS[i], id) end
  return 1
end
redis.call('HSET', entry, 'tries', 0, 'tok', '')
redis.call('ZREM', KEYS[3], id)
queue_callback(KEYS[string.sub(target, 1, 5) == 'task:' and 2 or 1], id, entry, now)
return 1
