-- Take the callback that has been due for longest, for a lease, and count a try of it. KEYS those that wait. ARGV what keys
-- begin with, nonce, lease ms, the longest wait ms. Returns its id, token and fields; nothing if none is due.
local now = now_ms()
local due = redis.call('ZRANGE', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', 0, 10)
-- What waits for longer than anything can was put off before Redis' clock went back.
local latest = now + math.max(tonumber(ARGV[3]), tonumber(ARGV[4]))
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], '(' .. latest, '+inf', 'BYSCORE', 'LIMIT', 0, 10)) do due[#due + 1] = id end
for _, id in ipairs(due) do
  local entry = ARGV[1] .. 'cb:e:' .. id
  if redis.call('EXISTS', entry) == 0 then
    redis.call('ZREM', KEYS[1], id)
  else
    local token = redis.call('HINCRBY', entry, 'tries', 1) .. ':' .. ARGV[2]
    redis.call('HSET', entry, 'tok', token)
    redis.call('ZADD', KEYS[1], now + ARGV[3], id)
    return {id, token, redis.call('HGETALL', entry)}
  end
end
return {}
