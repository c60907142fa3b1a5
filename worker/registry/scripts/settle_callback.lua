-- Note what came of sending a callback. KEYS those that wait, dead ones, adm. ARGV what keys begin with, id, token, why it
-- failed (empty: it was sent), ms until the next try (-1: there is none), ms for which a dead one is kept.
local entry, id, now = ARGV[1] .. 'cb:e:' .. ARGV[2], ARGV[2], now_ms()
if redis.call('HGET', entry, 'tok') ~= ARGV[3] then return 'fenced' end
if ARGV[4] == '' then
  redis.call('UNLINK', entry)
  redis.call('ZREM', KEYS[1], id)
  redis.call('HINCRBY', KEYS[3], 'cb_sent', 1)
  return 'sent'
end
redis.call('HSET', entry, 'tok', '', 'error', ARGV[4])
if tonumber(ARGV[5]) >= 0 then
  queue_callback(KEYS[1], id, entry, now + ARGV[5])
  return 'waits'
end
redis.call('ZREM', KEYS[1], id)
redis.call('ZADD', KEYS[2], now, id)
redis.call('PEXPIRE', entry, ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
-- What is forgotten, and beyond the newest 10 000.
for _, old in ipairs(redis.call('ZRANGE', KEYS[2], '-inf', now - ARGV[6], 'BYSCORE', 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[2], old)
end
for _, old in ipairs(redis.call('ZRANGE', KEYS[2], 0, -10001)) do
  redis.call('UNLINK', ARGV[1] .. 'cb:e:' .. old)
  redis.call('ZREM', KEYS[2], old)
end
return 'dead'
