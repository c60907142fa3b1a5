-- Which shard to claim on a message about some shard: a message is a hint. KEYS the unit of the message, queued, its job.
-- ARGV key prefix, 1 if only a tenant may come that has nothing here, ms of waiting that are worth one step of priority,
-- the member of the message, the names of the model that is served here (JSON), then each tenant that has shards here,
-- its prompts in them, the head of the last to come.
-- Returns a member of the queued shards; 'hint': that of the message; 'none': all that are queued may not come.
local UNIT, QUEUED, JOB, prefix = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local MOST_TENANTS, MOST_SHARDS = 1000, 64 -- looked at, of a model and of a tenant: bounds the script's time
local now = now_ms()

-- A suspect, or one that becomes a suspect when it is claimed: whoever is to run alone should not wait for a turn too.
local hint = redis.call('HMGET', UNIT, 'st', 'lease', 'att', 'model', 'judged', 'term')
if hint[1] == 'queued' and tonumber(hint[3]) > 0 then return 'hint' end
if hint[1] == 'running' and hint[5] and is_over(hint[2], hint[6], now) then return 'hint' end
-- Nobody would ever choose it: planned by an older worker, or taken out by one that does not know its job's version.
local tenant = redis.call('HGET', JOB, 'tenant')
if hint[1] == 'queued' and tenant then
  local key = QUEUED .. ':' .. tenant
  if hint[4] then key = key .. '@' .. hint[4] end
  if not redis.call('ZSCORE', key, ARGV[4]) then return 'hint' end
end

local prompts_here, near = {}, {}
for i = 6, #ARGV, 3 do prompts_here[ARGV[i]], near[ARGV[i]] = tonumber(ARGV[i + 1]), ARGV[i + 2] end

-- The tenant with the fewest prompts here, of several that whose shard has the earliest turn.
local chosen, is_any_queued = nil, false
local function look(tenants, of_model)
  for _, other in ipairs(redis.call('ZRANGE', tenants, 0, MOST_TENANTS - 1)) do
    local key = QUEUED .. ':' .. other .. of_model
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    local prompts, turn = prompts_here[other] or 0, tonumber(first[2])
    if not turn then
      redis.call('ZREM', tenants, other)
    else
      is_any_queued = true
      local is_first = not chosen or prompts < chosen.prompts or (prompts == chosen.prompts and turn < chosen.turn)
      if is_first and (prompts == 0 or ARGV[2] ~= '1') then
        chosen = {key = key, prompts = prompts, turn = turn, near = near[other] or ''}
      end
    end
  end
end

for _, model in ipairs(cjson.decode(ARGV[5])) do
  look(QUEUED .. '@' .. model, '@' .. model)
  if redis.call('EXISTS', QUEUED .. '@' .. model) == 0 then redis.call('ZREM', QUEUED .. '@', model) end
end
look(QUEUED, '') -- shards without a model are anybody's
if not chosen then return is_any_queued and 'none' or 'hint' end

-- Of its shards whose turns lie within a step of priority the next in prefix order; behind the last comes the first.
local best, best_head, best_is_ahead
local until_turn = chosen.turn + tonumber(ARGV[3])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', chosen.key, '-inf', until_turn, 'LIMIT', 0, MOST_SHARDS)) do
  local job_id, number = string.match(member, '^(.*)/(.*)$')
  local unit = redis.call('HMGET', prefix .. 'j:' .. job_id .. ':s:' .. number, 'st', 'head')
  local head = unit[2] or ''
  local is_ahead = head >= chosen.near
  if unit[1] ~= 'queued' then
    redis.call('ZREM', chosen.key, member)
  elseif not best or (is_ahead and not best_is_ahead) or (is_ahead == best_is_ahead and head < best_head) then
    best, best_head, best_is_ahead = member, head, is_ahead
  end
end
return best or 'hint'
