-- Say for a while what a worker serves, unless another model has one of its names. KEYS served, known names.
-- ARGV worker, what it serves (JSON: name, aliases, fingerprint and more), ms for which to say it, ms for which its
-- names stay known, 1 to look without saying it. Returns {'ok'}, or whose name it is: {'checkpoint'|'name', worker,
-- its model, the name}.
local SERVED, KNOWN, worker = KEYS[1], KEYS[2], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local ours = cjson.decode(ARGV[2])
local names = {[ours.name] = true}
for _, alias in ipairs(ours.aliases) do names[alias] = true end

local served = redis.call('HGETALL', SERVED)
for i = 1, #served, 2 do
  local ends, text = string.match(served[i + 1], '^(%d+) (.*)$')
  if not ends or tonumber(ends) <= now then
    redis.call('HDEL', SERVED, served[i])
  elseif served[i] ~= worker then
    local other = cjson.decode(text)
    if other.name == ours.name then
      if other.fingerprint ~= ours.fingerprint then return {'checkpoint', served[i], other.name, other.name} end
    else
      if names[other.name] then return {'name', served[i], other.name, other.name} end
      for _, alias in ipairs(other.aliases) do
        if names[alias] then return {'name', served[i], other.name, alias} end
      end
    end
  end
end
redis.call('ZREMRANGEBYSCORE', KNOWN, '-inf', now - ARGV[4])
if ARGV[5] == '1' then return {'ok'} end

redis.call('HSET', SERVED, worker, string.format('%.0f', now + ARGV[3]) .. ' ' .. ARGV[2])
for name in pairs(names) do
  if name ~= '*' then redis.call('ZADD', KNOWN, now, name) end
end
return {'ok'}
