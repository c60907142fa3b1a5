-- Take the callback that has been due for longest, for a lease, and count a try of it. KEYS those that wait. ARGV what keys
-- begin with, nonce, lease ms, the longest wait ms. Returns its id, token and fields; nothing if none is due.
local now = now_ms()
local due = redis.call('ZRANGE', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', 0, 10)
-- What waits for longer than anything can was put off before Redis' clock went back.
local latest = now + math.max(tonumber(ARGV[3]), tonumber(ARGV[4]))
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], '(' .. latest, '+inf', 'BYSCORE', 'LIMIT', 0, 10)) do due[#due + 1] = id end
for _, id in ipairs(due) do
  local entry = ARGV[1] .. 'cb:e:' .. id
  local tries = redis.call('EXISTS', entry) == 1 and redis.pcall('HINCRBY', entry, 'tries', 1)
  local failure = type(tries) == 'table' and tries.err
  -- No hash, or its tries are no number: it would hold up all behind it. Any other failure is no fault of the entry.
  local is_none = failure and (string.find(failure, 'WRONGTYPE') or string.find(failure, 'not an integer')
    or string.find(failure, 'overflow'))
  if failure and not is_none then return tries end
  if failure or not tries then
    redis.call('ZREM', KEYS[1], id)
  else
    local token = tries .. ':' .. ARGV[2]
    redis.call('HSET', entry, 'tok', token)
    redis.call('ZADD', KEYS[1], now + ARGV[3], id)
    return {id, token, redis.call('HGETALL', entry)}
  end
end
return {}
