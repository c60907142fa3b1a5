-- Take the callback that has been due for longest, for a lease, and count a try of it. KEYS those that wait. ARGV what keys
-- begin with, nonce, lease ms, the longest wait ms, then tenants whose callbacks are passed over. Returns its id, token and
-- fields; nothing if none is due.
local MOST_LOOKED_AT = 1000 -- bounds the script's time
local now, crowded = now_ms(), {}
for i = 5, #ARGV do crowded[ARGV[i]] = true end

-- What taking it answers; nil if it is passed over; false if it is none, and gone from the queue.
local function take(id)
  local entry = ARGV[1] .. 'cb:e:' .. id
  if #ARGV > 4 and crowded[redis.pcall('HGET', entry, 'tenant')] then return end
  local tries = redis.call('EXISTS', entry) == 1 and redis.pcall('HINCRBY', entry, 'tries', 1)
  local failure = type(tries) == 'table' and tries.err
  -- No hash, or its tries are no number: it would hold up all behind it. Any other failure is no fault of the entry.
  local is_none = failure and (string.find(failure, 'WRONGTYPE') or string.find(failure, 'not an integer')
    or string.find(failure, 'overflow'))
  if failure and not is_none then return tries end
  if failure or not tries then
    redis.call('ZREM', KEYS[1], id)
    return false
  end
  local token = tries .. ':' .. ARGV[2]
  redis.call('HSET', entry, 'tok', token)
  queue_callback(KEYS[1], id, entry, now + ARGV[3])
  return {id, token, redis.call('HGETALL', entry)}
end

local function take_between(from, to)
  local passed = 0
  for _ = 1, MOST_LOOKED_AT, 100 do
    local ids = redis.call('ZRANGE', KEYS[1], from, to, 'BYSCORE', 'LIMIT', passed, 100)
    for _, id in ipairs(ids) do
      local taken = take(id)
      if taken then return taken end
      if taken == nil then passed = passed + 1 end
    end
    if #ids < 100 then return end
  end
end

-- What waits for longer than anything can was put off before Redis' clock went back.
local latest = now + math.max(tonumber(ARGV[3]), tonumber(ARGV[4]))
return take_between('-inf', now) or take_between('(' .. latest, '+inf') or {}
