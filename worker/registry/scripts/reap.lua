-- Units that are due for a look. Each is put off in the same breath, so that one worker alone acts on it.
-- KEYS open. ARGV key prefix, limit, grace ms, longest grace ms, ms after which a waiting unit is announced anyway,
-- the priority of a plan's message, then the number of waiting messages for each priority 0..9.
-- Returns triples: member, what to do (announce|close), priority. Keys of jobs and units are derived from the members.
local OPEN, prefix = KEYS[1], ARGV[1]
local limit, grace, longest, stale = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local out = {}

local function act(member, what, priority)
  out[#out + 1] = member
  out[#out + 1] = what
  out[#out + 1] = priority
end

local function announce(member, unit_key, repeats, priority)
  redis.call('HSET', unit_key, 'rp', repeats + 1, 'since', now)
  redis.call('ZADD', OPEN, now + math.min(grace * 2 ^ math.min(repeats, 30), longest), member)
  act(member, 'announce', priority)
end

for _, member in ipairs(redis.call('ZRANGEBYSCORE', OPEN, '-inf', now, 'LIMIT', 0, limit)) do
  local job_id, unit = string.match(member, '^(.*)/(.*)$')
  local base = prefix .. 'j:' .. job_id
  local unit_key = base .. ':s:' .. unit
  local job = redis.call('HMGET', base .. ':job', 'st', 'cancel', 'deadline', 'pri')
  local held = redis.call('HMGET', unit_key, 'st', 'lease', 'rp', 'since')
  if not held[1] or (job[1] ~= 'queued' and job[1] ~= 'running') then
    redis.call('ZREM', OPEN, member)
  elseif held[1] == 'running' and tonumber(held[2]) > now then
    redis.call('ZADD', OPEN, held[2], member)
  elseif job[2] ~= '0' or (job[3] ~= '0' and tonumber(job[3]) <= now) then
    redis.call('ZADD', OPEN, now + grace, member)
    act(member, 'close', job[4])
  elseif held[1] == 'running' then
    announce(member, unit_key, tonumber(held[3]), job[4])
  elseif tonumber(ARGV[7 + (unit == 'plan' and ARGV[6] or job[4])]) == 0 or now - held[4] > stale then
    -- Queued, and nothing waits in its lane, or it waits suspiciously long: its message may be lost.
    announce(member, unit_key, tonumber(held[3]), job[4])
  else
    redis.call('ZADD', OPEN, now + grace, member)
  end
end
return out
