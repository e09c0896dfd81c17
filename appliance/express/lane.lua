-- Runs in Envoy for each call: a plain single call to an instance of the lane goes straight to one of its replicas.
--
-- Everything else stays as it came and goes to the multiplexer. So does a caller that is not known: the multiplexer
-- judges him, and says in its reply for how many seconds he may pass here without it. Each worker thread of Envoy has
-- these variables for itself. METHODS, DIRECT, VALID and VALID_SECS stand before this text: `export.envoy` writes them.

local LARGEST = 1048576 -- bytes of a message; one that is larger is no matter of microseconds
local MOST_KNOWN = 10000 -- callers
local LONGEST_KNOWN = 1000 -- bytes of what one sends about himself: where no key is asked for, it may be anything
local CREDENTIALS = {"authorization", "api-key", "x-api-key"}
local ADMITTED, ALLOWED = "x-tei-express", "x-tei-express-secs"
local known, count = {}, 0
local looked, valid = 0, 0
local last = 0

-- The time. Where the clock was set back, nobody is known any more: else he passed for as long as it went back.
local function time()
  local now = os.time()
  if now < last then known, count = {}, 0 end
  last = now
  return now
end

-- Whether the tables are those of this moment. VALID is the file in which their writer says until when they are; one
-- that hangs says nothing more, and a port in them may be another instance's by now. Looked at once a second.
local function current()
  local now = time()
  if looked ~= now then
    local file = io.open(VALID)
    looked, valid = now, file and tonumber(file:read("*l") or "") or 0
    if file then file:close() end
  end
  return now < valid and valid <= now + VALID_SECS + 1 -- else the clock was set back since
end

-- Who calls: everything by which the multiplexer judges. Nil where something was sent twice, or is too long.
local function caller(handle, headers)
  local parts = {}
  for place, name in ipairs(CREDENTIALS) do
    if headers:getNumValues(name) > 1 then return nil end
    parts[place] = headers:get(name) or ""
  end
  local tls = handle:streamInfo():downstreamSslConnection()
  parts[4] = tls and tls:sha256PeerCertificateDigest() or ""
  local who = table.concat(parts, "\n") -- metadata of Envoy cuts a text at a zero byte
  return #who <= LONGEST_KNOWN and who or nil
end

-- A number as protobuf has it, and the position behind it; nil for one of more than four bytes.
local function varint(text, at)
  local value, factor = 0, 1
  for _ = 1, 4 do
    local byte = text:byte(at)
    if not byte then return nil end
    at = at + 1
    if byte < 128 then return value + byte * factor, at end
    value, factor = value + (byte - 128) * factor, factor * 128
  end
  return nil
end

-- The name and TEI's request in a message of the multiplexer. Nil unless it has exactly these two, each once.
local function unwrap(text, from)
  local at, name, request = from, nil, nil
  while at <= #text do
    local tag = text:byte(at)
    local length, begin = varint(text, at + 1)
    if not length or begin + length - 1 > #text then return nil end
    local finish = begin + length
    if tag == 10 and not name then -- field 1, the target: of its kinds only field 1, instance_name
      local inner, first = varint(text, begin + 1)
      if text:byte(begin) ~= 10 or not inner or first + inner ~= finish then return nil end
      name = text:sub(first, finish - 1)
    elseif tag == 18 and not request then -- field 2
      request = text:sub(begin, finish - 1)
    else
      return nil
    end
    at = finish
  end
  return name, request
end

-- The length of a message as it stands before it: four bytes, the highest first.
local function written(length)
  local floor = math.floor
  return string.char(0, floor(length / 16777216) % 256, floor(length / 65536) % 256, floor(length / 256) % 256, length % 256)
end

-- The one message of a call that is not compressed, with the five bytes before it; nil for anything else.
local function message(handle)
  local body = handle:body()
  local length = body and body:length() or 0
  if length < 5 or length > LARGEST then return nil end
  local text = body:getBytes(0, length)
  if text:sub(1, 5) ~= written(length - 5) then return nil end
  return body, text
end

-- Whether the caller was admitted a moment ago. If not, the reply may say so.
local function knows(handle, headers)
  local who = caller(handle, headers)
  if not who then return false end
  local now = time()
  if (known[who] or 0) > now then return true end
  local asked = handle:streamInfo():dynamicMetadata()
  asked:set("tei.express", "who", who)
  asked:set("tei.express", "at", now) -- his key may be revoked before he is answered
  return false
end

local function admit(handle, instance)
  local headers = handle:headers() -- anew: after a look at the body the earlier ones are not valid
  headers:replace("x-tei-instance", instance)
  headers:replace(ADMITTED, "admitted")
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local path = headers:get(":path")
  local method, instance = METHODS[path], nil
  if DIRECT[path] then
    instance = headers:getNumValues("x-tei-instance") == 1 and headers:get("x-tei-instance")
    if not instance or not handle:metadata():get(instance) then return end
  elseif not method then
    return
  end
  if headers:get("x-tei-cache") or headers:get("x-tei-expect-fingerprint") then return end -- the multiplexer's to read
  if not current() then return end
  if headers:get(ADMITTED) ~= "inside" and not knows(handle, headers) then return end
  -- Of all calls: half of a message would keep a thread of the replica, and many large ones its memory.
  local body, text = message(handle)
  if not body then return end
  if method then
    local name, request = unwrap(text, 6)
    if not request or not handle:metadata():get(name) then return end
    body:setBytes(written(#request) .. request)
    instance, headers = name, handle:headers()
    headers:replace(":path", method)
    headers:remove("content-length")
  end
  admit(handle, instance)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local secs = headers:get(ALLOWED)
  if not secs then return end
  headers:remove(ALLOWED)
  local asked = handle:streamInfo():dynamicMetadata():get("tei.express")
  if not asked or asked.at > time() then return end
  if not known[asked.who] then
    if count >= MOST_KNOWN then known, count = {}, 0 end
    known[asked.who], count = 0, count + 1
  end
  known[asked.who] = math.max(known[asked.who], asked.at + tonumber(secs)) -- answers come in any order
end
