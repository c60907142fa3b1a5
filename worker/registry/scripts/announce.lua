-- Say for a while what a worker serves, unless another model has one of its names. KEYS served, known models.
-- ARGV worker, what it serves (JSON: name, aliases, fingerprint and more), ms for which to say it, ms for which the model
-- stays known, 1 to look only: then the model is noted as one to wait for. Returns {'ok', whether it was said before}, or
-- whose name it is: {'checkpoint'|'name', worker, its model, the name}.
local SERVED, KNOWN, worker = KEYS[1], KEYS[2], ARGV[1]
local now = now_ms()

-- Its name and aliases; nothing of what this version does not write.
local function read(text)
  local is_json, served = pcall(cjson.decode, text)
  if is_json and type(served) == 'table' and type(served.name) == 'string' and type(served.aliases) == 'table' then
    return served
  end
end

-- The entries of a hash, without those that have run out.
local function live(key)
  local found, entries = {}, redis.call('HGETALL', key)
  for i = 1, #entries, 2 do
    local ends, text = string.match(entries[i + 1], '^(%d+) (.*)$')
    if not ends or tonumber(ends) <= now then
      redis.call('HDEL', key, entries[i])
    else
      found[entries[i]] = text
    end
  end
  return found
end

local ours = cjson.decode(ARGV[2])
local names = {[ours.name] = true}
for _, alias in ipairs(ours.aliases) do names[alias] = true end

local served = live(SERVED)
local was_said = served[worker] and '1' or '0'
served[worker] = nil
for other_worker, text in pairs(served) do
  local other = read(text)
  if other and other.name == ours.name then
    if other.fingerprint ~= ours.fingerprint then return {'checkpoint', other_worker, other.name, other.name} end
  elseif other then
    if names[other.name] then return {'name', other_worker, other.name, other.name} end
    for _, alias in ipairs(other.aliases) do
      if names[alias] then return {'name', other_worker, other.name, alias} end
    end
  end
end

live(KNOWN)
local function entry(ms) return string.format('%.0f', now + ms) .. ' ' .. ARGV[2] end
if ARGV[5] == '1' then
  redis.call('HSETNX', KNOWN, ours.name, entry(ARGV[4]))
  return {'ok', was_said}
end
redis.call('HSET', KNOWN, ours.name, entry(ARGV[4]))
redis.call('HSET', SERVED, worker, entry(ARGV[3]))
return {'ok', was_said}
